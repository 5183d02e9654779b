"""What makes the policy for jobs, and what it is given."""

from collections.abc import Callable
from dataclasses import dataclass

from caravan_scheduler.config import Clock
from caravan_scheduler.shard.policy import JobPolicy
from caravan_scheduler.waiting.fair_share import Shares


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """What a policy looks at."""

    clock: Clock
    shares: Shares


NewPolicy = Callable[[PolicyInput], JobPolicy]

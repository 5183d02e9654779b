"""The reports of a shard about itself: identity, limits, model, progress."""

from dataclasses import dataclass

from caravan_router.core.engine import ModelFacts
from caravan_router.scheduling.events import ShardLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """A shard's identity, lease, limits and model.

    ``shard_id`` is its name, ``version`` that of its program. ``incarnation`` is new with every start of its process.
    ``epoch`` numbers its last lease; ``leased`` says whether a router still holds that one.
    ``batch_invariant``: drafts change no text there, not even by rounding; None if it was not measured.
    """

    shard_id: str
    version: str
    incarnation: str
    epoch: int
    leased: bool
    limits: ShardLimits
    facts: ModelFacts
    batch_invariant: bool | None = None


@dataclass(frozen=True, slots=True)
class ShardWish:
    """What a router that wants a shard says of itself: how many it holds of the shard's model.

    ``urgent``: it ends, and no shard serves the requests that it has left.
    """

    held: int
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """A shard's progress: steps since its start, whether it has work, whether it drains.

    ``wish``: of another router that asks for it; None if there is none.
    """

    steps: int
    busy: bool
    draining: bool
    wish: ShardWish | None = None

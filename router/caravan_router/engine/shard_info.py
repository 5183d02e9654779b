"""The reports of a shard about itself: identity, limits, model, progress."""

from dataclasses import dataclass

from caravan_router.core.engine import ModelFacts
from caravan_router.scheduling.events import ShardLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """A shard's identity, lease, limits and model.

    ``shard_id`` is its name, ``version`` that of its program. ``incarnation`` is new with every start of its process.
    ``epoch`` numbers its last lease; ``leased`` says whether a router still holds that one.
    """

    shard_id: str
    version: str
    incarnation: str
    epoch: int
    leased: bool
    limits: ShardLimits
    facts: ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """A shard's progress: steps since its start, whether it has work, whether it drains.

    ``wanted_by``: another router asks for it, and holds so many shards; None if there is none.
    """

    steps: int
    busy: bool
    draining: bool
    wanted_by: int | None = None

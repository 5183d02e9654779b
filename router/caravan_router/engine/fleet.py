"""What shards report, and the fleet that they form: replicas of one model with the limits that hold on all."""

import dataclasses
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
    """A shard's progress: steps since its start, whether it has work, whether it drains."""

    steps: int
    busy: bool
    draining: bool


class Fleet:
    """Judges which shards may serve together, and combines their limits.

    The facts of a shard stay while it is away, so that what clients were told stays true, until its address is gone.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, ModelFacts] = {}
        self.facts: ModelFacts | None = None
        """The model with the limits that hold on every shard, or held on the last one; None until one was accepted."""

    def accept(self, address: str, info: ShardInfo) -> str | None:
        """Add the shard at ``address``, or return why it cannot serve beside the others."""
        for other_address, other in self._accepted.items():
            if other_address != address and other.fingerprint != info.facts.fingerprint:
                return f"it serves {info.facts.name}, {other_address} serves {other.name}: all must have one model"
        self._accepted[address] = info.facts
        self._combine()
        return None

    def forget(self, address: str) -> None:
        """Forget the shard at ``address``, an address that is gone."""
        if self._accepted.pop(address, None) is not None:
            self._combine()

    def _combine(self) -> None:
        every = list(self._accepted.values())
        if not every:
            return
        self.facts = dataclasses.replace(
            every[0],
            max_sequence_tokens=min(facts.max_sequence_tokens for facts in every),
            max_top_n_tokens=min(facts.max_top_n_tokens for facts in every),
            max_tokenize_bytes=min(facts.max_tokenize_bytes for facts in every),
            total_cells=sum(facts.total_cells for facts in every),
            adapters=tuple(name for name in every[0].adapters if all(name in facts.adapters for facts in every)),
            embedding_size=min(facts.embedding_size for facts in every),
            max_embed_tokens=min(facts.max_embed_tokens for facts in every),
        )

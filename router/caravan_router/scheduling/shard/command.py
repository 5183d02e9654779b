"""A command that was sent to a shard and has not ended."""

from dataclasses import dataclass, field
from enum import Enum

from caravan_router.scheduling.shard.resident import Resident


class Kind(Enum):
    """Only a Decode gives way to the next command."""

    PREFILL = "prefill"
    DECODE = "decode"
    FILTER = "filter"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


# A Decode that is told to yield has seldom gone further than this beyond the passes that were reported. When it has,
# the shard says that the cache is full, and nothing is lost.
_UNSEEN_STEPS = 4


@dataclass(slots=True, kw_only=True)
class InFlight:
    """``residents`` by sequence id as of then: an id may be reused before late results arrive.

    ``chunk_tokens``: what each prompt advances by when the pass succeeds. ``steps_left``: of a Decode.
    """

    command_id: int
    kind: Kind
    residents: dict[int, Resident]
    chunk_tokens: dict[int, int] = field(default_factory=dict)
    steps_left: int = 0
    # Of a SwapOut: handle and first saved position, by sequence id.
    swaps: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        return self.kind is Kind.DECODE

    @property
    def coming_cells(self) -> int:
        """Cells that its decodes may take before the next command runs."""
        if self.kind is Kind.PREFILL:
            return len(self.residents) - len(self.chunk_tokens)
        return len(self.residents) * min(self.steps_left, _UNSEEN_STEPS)

    def starts(self, resident: Resident) -> bool:
        """Whether the shard may hear of ``resident`` with it."""
        return (resident.sequence_id in self.chunk_tokens or self.kind is Kind.SWAP_IN) and self.residents.get(
            resident.sequence_id
        ) is resident

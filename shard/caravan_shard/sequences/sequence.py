"""What the shard knows of each sequence, and how many cells all of them hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from caravan_shard.arrays import Floats
from caravan_shard.constraints.matching import Matching
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.parameters import SequenceParameters
from caravan_shard.sampling.penalties import PenaltyCounts


class Phase(Enum):
    """PREFILLING until its prompt is complete, RUNNING until EOS or length, ENDED until released."""

    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class CellRun:
    """Cells of positions [start, end) that were computed by the sequence of this birth number."""

    birth: int
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One sequence.

        tokens   [ inherited cells | own cells | pending ]
        position 0       own_start    computed   len(tokens)

    ``tokens`` are all that is known; the cache holds [0, computed). A RUNNING sequence has one pending token, sampled
    and not yet computed; so has an ENDED one, whose pending token is the last of it, unless it was parked.

    ``last_logits`` [vocabulary] are those after the last computed token, where the next prompt token is to be told.
    """

    sequence_id: int
    parameters: SequenceParameters
    birth: int
    inherited: tuple[CellRun, ...] = ()
    own_start: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    phase: Phase = Phase.PREFILLING
    penalties: PenaltyCounts | None = None
    last_logits: Floats | None = None
    matching: Matching | None = None

    def extend(self, tokens: Iterable[int]) -> None:
        """More tokens are known."""
        known = len(self.tokens)
        self.tokens.extend(tokens)
        if self.penalties is not None:
            border = max(known, self.parameters.prompt_length)
            self.penalties.add(self.tokens[known:border], output=False)
            self.penalties.add(self.tokens[border:], output=True)

    def park(self, length: int) -> None:
        """End it with the first ``length`` of its computed tokens."""
        assert 0 < length <= self.computed, f"{length} of {self.computed} tokens"
        self.inherited = self.runs_up_to(length)
        self.own_start = self.computed = length
        del self.tokens[length:]
        self.penalties = self.matching = self.last_logits = None
        self.phase = Phase.ENDED

    def runs(self) -> tuple[CellRun, ...]:
        """The cells it holds, in order of position."""
        if self.computed == self.own_start:
            return self.inherited
        return (*self.inherited, CellRun(self.birth, self.own_start, self.computed))

    def runs_up_to(self, length: int) -> tuple[CellRun, ...]:
        """The cells of its first ``length`` positions."""
        return tuple(CellRun(run.birth, run.start, min(run.end, length)) for run in self.runs() if run.start < length)


def used_cells(sequences: Iterable[Sequence], layout: KvLayout) -> int:
    """Cells held by any of the sequences; in the unified layout a shared cell counts once."""
    if layout is KvLayout.SPLIT:
        return sum(sequence.computed for sequence in sequences)
    # All runs of one birth start where that sequence began to compute, so the longest covers the others.
    longest: dict[int, CellRun] = {}
    for sequence in sequences:
        for run in sequence.runs():
            if run.birth not in longest or longest[run.birth].end < run.end:
                longest[run.birth] = run
    return sum(run.end - run.start for run in longest.values())

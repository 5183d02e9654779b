"""A sequence as the shard knows it, and the number of cells that sequences hold."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from caravan_proto.messages.limits import KvLayout
from caravan_shard.arrays import Floats
from caravan_shard.constraints.matching import Matching, ThoughtMatching
from caravan_shard.media import NO_TOKEN, CellSpan, spans_before
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.sampling.feedback import Feedback
from caravan_shard.sampling.penalties import LogitBiases, Penalty
from caravan_shard.speculation.drafter import Drafter

_log = logging.getLogger(__name__)


class Phase(Enum):
    """PREFILLING until the prompt is complete, RUNNING until the sequence ends, ENDED until it is released."""

    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class CellRange:
    """The cells of positions [start, end), which the sequence with this birth number computed."""

    birth: int
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One sequence.

        tokens   [ inherited cells | own cells | pending ]
        position 0       own_start    computed   len(tokens)

    ``tokens`` are all known tokens; the cache holds [0, computed). A RUNNING sequence has one pending token, which was
    sampled and is not computed yet. An ENDED sequence has one too, its last token, unless it was parked.

    ``birth``: a number that no other sequence of the shard has; see `CellRange`.
    ``last_logits`` [vocabulary]: the logits after the last computed token, kept while prompt_logprobs of the next chunk
    need them.
    ``candidates``: how many of the highest logits decide its next tokens; 0 if all may be needed.
    ``spans``: the media among its computed cells, in a model that cannot cut them; elsewhere empty.
    """

    sequence_id: int
    parameters: PreparedParameters
    birth: int
    inherited: tuple[CellRange, ...] = ()
    own_start: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    phase: Phase = Phase.PREFILLING
    penalties: tuple[Penalty, ...] = ()
    biases: LogitBiases | None = None
    last_logits: Floats | None = None
    matching: Matching | ThoughtMatching | None = None
    drafter: Drafter | None = None
    feedback: Feedback | None = None
    candidates: int = 0
    spans: tuple[CellSpan, ...] = ()

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens that were computed or sampled."""
        known = len(self.tokens)
        self.tokens.extend(tokens)
        border = max(known, self.parameters.prompt_length)
        for penalty in self.penalties:
            penalty.add([token for token in self.tokens[known:border] if token != NO_TOKEN], output=False)
            penalty.add(self.tokens[border:], output=True)

    def park(self, length: int) -> None:
        """End the sequence and keep the first ``length`` of its computed tokens."""
        assert 0 < length <= self.computed, f"{length} of {self.computed} tokens"
        self.inherited = self.ranges_up_to(length)
        self.own_start = self.computed = length
        del self.tokens[length:]
        self.spans = spans_before(self.spans, length)
        self.penalties = ()
        self.last_logits = None
        self.end()

    def end(self) -> None:
        """Note that it gets no more tokens."""
        self.phase = Phase.ENDED
        if self.drafter is not None:
            self.drafter.end(self.tokens, self.parameters.prompt_length)
        self.matching = self.drafter = self.feedback = None

    def ranges(self) -> tuple[CellRange, ...]:
        """Return the cells it holds, in order of position."""
        if self.computed == self.own_start:
            return self.inherited
        return (*self.inherited, CellRange(self.birth, self.own_start, self.computed))

    def ranges_up_to(self, length: int) -> tuple[CellRange, ...]:
        """Return the cells of its first ``length`` positions."""
        held = (one for one in self.ranges() if one.start < length)
        return tuple(CellRange(one.birth, one.start, min(one.end, length)) for one in held)


def used_cells(sequences: Iterable[Sequence], layout: KvLayout) -> int:
    """Count the cells that the sequences hold; in the unified layout a shared cell counts once."""
    if layout is KvLayout.SPLIT:
        return sum(sequence.computed for sequence in sequences)
    # All ranges of one birth start where that sequence began to compute, so the longest covers the others.
    # Sequences that share a prefix have ranges of the same birth.
    longest: dict[int, CellRange] = {}
    for sequence in sequences:
        for one in sequence.ranges():
            if one.birth not in longest or longest[one.birth].end < one.end:
                longest[one.birth] = one
    return sum(one.end - one.start for one in longest.values())


def log_traced(sequence: Sequence, message: str, **fields: object) -> None:
    """Log an event of ``sequence`` if its request is traced: for everybody if the trace is sampled, else to debug."""
    parameters = sequence.parameters
    if parameters.traceparent:
        level = logging.INFO if parameters.is_sampled else logging.DEBUG
        _log.log(level, message, extra={"trace_id": parameters.trace_id, "sequence": sequence.sequence_id, **fields})

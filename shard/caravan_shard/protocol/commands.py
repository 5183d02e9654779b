"""The commands of a router. Their integers come from the wire and are not checked yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from caravan_shard.arrays import State
from caravan_shard.backends.base import Prefix
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.run import Run
from caravan_shard.protocol.sequence_parameters import SequenceParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """End a sequence and keep its first ``length`` tokens for others to start from."""

    sequence_id: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Precedes the rest of a command: release sequences, park others, forget saved runs, move others to disk."""

    release_ids: Sequence[int] = ()
    parks: Sequence[Park] = ()
    dropped_runs: Sequence[bytes] = ()
    spilled_runs: Sequence[bytes] = ()


EMPTY_HEADER = Header()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of prompt tokens. Only the first chunk of a sequence has ``parameters``, and it may have a ``copy``.

    A ``copy`` whose source is the sequence's own id takes over what that id holds.
    """

    sequence_id: int
    start: int
    tokens: Sequence[int]
    last: bool
    parameters: SequenceParameters | None = None
    copy: Prefix | None = None

    @property
    def takes_over(self) -> bool:
        """Whether the new sequence takes over what its id holds."""
        return self.copy is not None and self.copy.source_id == self.sequence_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Run one step over prompt chunks, with one token of each riding sequence."""

    chunks: Sequence[Chunk]
    rider_ids: Sequence[int] = ()
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Run up to ``max_steps`` steps over the sequences, in which none gets more than ``max_steps`` tokens.

    A step may verify up to ``max_draft_tokens`` draft tokens, of all sequences together.

    A step that ends less than ``reply_interval_ns`` after the last reply may be reported with the next one.
    """

    sequence_ids: Sequence[int]
    max_steps: int
    max_draft_tokens: int = 0
    reply_interval_ns: int = 0
    header: Header = EMPTY_HEADER


class RowOutputs(Enum):
    """After which tokens of a row the distribution of the next token is returned."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tokens to compute behind what a sequence holds, or behind a ``copy``, which makes a new and ended sequence.

    ``outputs``: None if the router named none that this shard knows. ``keep_length``: cut the sequence back to this
    length afterwards; 0 releases it, None keeps all tokens.
    """

    sequence_id: int
    start: int
    tokens: Sequence[int]
    outputs: RowOutputs | None
    copy: Prefix | None = None
    adapter: str = ""
    top_n: int = 0
    score_ids: Sequence[int] = ()
    keep_length: int | None = None

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)

    @property
    def kept(self) -> int:
        """The length that the sequence is cut back to."""
        return self.end if self.keep_length is None else self.keep_length

    @property
    def takes_over(self) -> bool:
        """Whether the new sequence takes over what its id holds."""
        return self.copy is not None and self.copy.source_id == self.sequence_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Run one step over rows of tokens, which samples nothing."""

    rows: Sequence[Row]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences and release all others."""

    keep_ids: Sequence[int]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEntry:
    """Save the cells [start, cuts[-1]) of a sequence as a run with a key for each cut, then ``release`` it or not."""

    sequence_id: int
    start: int
    cuts: Sequence[int]
    keys: Sequence[bytes]
    release: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Save runs where possible."""

    entries: Sequence[SaveEntry]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSlice:
    """The cells [start, end) of the run that ``key`` names."""

    key: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEntry:
    """Make an ended sequence that holds ``tokens``, with the cells of ``slices``."""

    sequence_id: int
    tokens: Sequence[int]
    slices: Sequence[RunSlice]
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Make sequences of saved runs where possible."""

    entries: Sequence[LoadEntry]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLayout:
    """Give the cells another layout; None for one that this shard does not know."""

    layout: KvLayout | None
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True)
class Embed:
    """Embed one text, which was checked before. Needs no lease, since it touches no sequence."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Adopt:
    """Keep a run of another shard, whose bytes were checked. Needs no turn, since it touches no sequence."""

    run: Run
    state: State


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Release every sequence: the lease changed hands or ended. Saved runs stay."""


Command = Prefill | Decode | Evaluate | FilterBatch | Save | Load | SetLayout | Embed | Adopt | ReleaseAll

"""The commands of a router. Their integers come from the wire and are not checked yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_shard.backends.base import Prefix
from caravan_shard.protocol.sequence_parameters import SequenceParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """End a sequence and keep its first ``length`` tokens for others to start from."""

    sequence_id: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Precedes the rest of a command: release sequences, then park others, then forget swapped ones."""

    release_ids: Sequence[int] = ()
    parks: Sequence[Park] = ()
    dropped_handles: Sequence[int] = ()


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
    """Run up to ``max_steps`` steps over the sequences."""

    sequence_ids: Sequence[int]
    max_steps: int
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences and release all others."""

    keep_ids: Sequence[int]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOutEntry:
    """Save positions [start, computed) of a sequence under ``handle``."""

    sequence_id: int
    handle: int
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut:
    """Save the sequences where possible, and release all of them."""

    entries: Sequence[SwapOutEntry]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapInEntry:
    """Restore the sequence saved under ``handle``; ``copy`` provides tokens [0, start) if start was not 0."""

    handle: int
    sequence_id: int
    copy: Prefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn:
    """Restore the sequences where possible; their handles are gone afterwards."""

    entries: Sequence[SwapInEntry]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True)
class Embed:
    """Embed one text, which was checked before. Needs no lease, since it touches no sequence."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Release every sequence and forget the swapped ones: the lease changed hands or ended."""


Command = Prefill | Decode | FilterBatch | SwapOut | SwapIn | Embed | ReleaseAll

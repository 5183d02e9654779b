"""What the router may ask of the worker. Integers come from the wire: nothing here is checked yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_shard.backends.base import Prefix
from caravan_shard.protocol.parameters import SequenceParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """End a sequence and keep its first ``length`` tokens for others to start from."""

    sequence_id: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What happens before anything else of a command: releases, then parks; ``dropped_handles`` are forgotten."""

    release_ids: Sequence[int] = ()
    parks: Sequence[Park] = ()
    dropped_handles: Sequence[int] = ()


EMPTY_HEADER = Header()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of prompt tokens; ``parameters`` and ``copy`` only with the first chunk of a sequence.

    A ``copy`` of what its own id holds takes that over.
    """

    sequence_id: int
    start: int
    tokens: Sequence[int]
    last: bool
    parameters: SequenceParameters | None = None
    copy: Prefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One pass over prompt chunks, with one token of each riding sequence."""

    chunks: Sequence[Chunk]
    rider_ids: Sequence[int] = ()
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Up to ``max_steps`` passes over the sequences."""

    sequence_ids: Sequence[int]
    max_steps: int
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences, release all others."""

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
    """Save the sequences where that can be done, and release all of them."""

    entries: Sequence[SwapOutEntry]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapInEntry:
    """Bring back what ``handle`` names; ``copy`` says where tokens [0, start) come from if start was not 0."""

    handle: int
    sequence_id: int
    copy: Prefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn:
    """Bring the sequences back where that can be done; their handles are gone afterwards."""

    entries: Sequence[SwapInEntry]
    header: Header = EMPTY_HEADER


@dataclass(frozen=True, slots=True)
class Embed:
    """The vector of one text, checked before. Of no lease: it touches no sequence."""

    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Release every sequence and forget the swapped ones: the lease changed hands or ended."""


Command = Prefill | Decode | FilterBatch | SwapOut | SwapIn | Embed | ReleaseAll

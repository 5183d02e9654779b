"""What the router may ask of the worker. Integers come from the wire: nothing here is checked yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_shard.parameters import SequenceParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCopy:
    """Share tokens [0, length) of another sequence."""

    source_id: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of prompt tokens; ``parameters`` and ``copy`` only with the first chunk of a sequence."""

    sequence_id: int
    start: int
    tokens: Sequence[int]
    last: bool
    parameters: SequenceParameters | None = None
    copy: PrefixCopy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One pass over prompt chunks, with one token of each riding sequence."""

    chunks: Sequence[Chunk]
    rider_ids: Sequence[int] = ()
    release_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Up to ``max_steps`` passes over the sequences."""

    sequence_ids: Sequence[int]
    max_steps: int
    release_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences, release all others."""

    keep_ids: Sequence[int]
    release_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Release every sequence: the lease changed hands or ended."""


Command = Prefill | Decode | FilterBatch | ReleaseAll

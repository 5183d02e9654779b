"""Images and audio in prompts: what an encoder makes of them, where sequences have them, and what the shard keeps."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from caravan_proto.messages.media import MediaFacts, MediaShape, MediaSpan
from caravan_shard.arrays import Floats, Ids

# Stands for the token of a cell that has an embedding of a medium instead.
NO_TOKEN = -1


class EncodingError(Exception):
    """A medium cannot be encoded; the message says why."""


@dataclass(frozen=True, slots=True)
class SliceSize:
    """How many cells a slice of a medium takes, and by how many positions the cell behind it is later."""

    cells: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedSlice:
    """A slice of a medium: the embedding of each cell, [cells, size].

    ``planes`` [dimensions, cells]: the positions of the cells relative to the first, where positions have several
    dimensions; None where each cell is one later than the one before. ``causal``: a cell sees those before it only.
    """

    embeddings: Floats
    size: SliceSize
    planes: Ids | None = None
    causal: bool = True

    @property
    def size_bytes(self) -> int:
        """How much memory it takes."""
        return self.embeddings.nbytes + (0 if self.planes is None else self.planes.nbytes)


class MediaRows(NamedTuple):
    """Rows of a forward pass, from ``row`` on, whose embeddings are the cells [first, first + cells) of a slice."""

    row: int
    piece: EncodedSlice
    first: int
    cells: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the slice."""
        return self.cells == self.piece.size.cells


# What a medium is in a prompt, in order: tokens of text, and slices of the medium between them.
MediumTokens = Sequence[Sequence[int] | SliceSize]


class MediaEncoder(Protocol):
    """Turns pictures and sound into embeddings."""

    @property
    def facts(self) -> MediaFacts: ...

    def tokenize(self, shape: MediaShape) -> MediumTokens:
        """Return what a medium of this shape is in a prompt. Raises EncodingError. Any thread may call it."""
        ...

    def encode(self, shape: MediaShape, data: bytes) -> Sequence[EncodedSlice]:
        """Return the slices of a medium. Raises EncodingError. One thread at a time may call it, also beside steps."""
        ...

    def close(self) -> None:
        """Free everything. The encoder is not in use."""
        ...


@dataclass(frozen=True, slots=True)
class CellSpan:
    """The cells [start, end) of a sequence are of one slice of a medium.

    ``positions``: by how many positions the cell behind them is later than the first of them.
    """

    start: int
    end: int
    positions: int


def with_media(token_ids: Sequence[int], media: Sequence[MediaSpan]) -> Sequence[int]:
    """Return the tokens with `NO_TOKEN` under ``media``."""
    if not media:
        return token_ids
    tokens = list(token_ids)
    for span in media:
        tokens[span.offset : span.end] = [NO_TOKEN] * span.count
    return tokens


def is_within(spans: Sequence[CellSpan], cell: int) -> bool:
    """Whether a sequence that ends before ``cell`` has a part of a span only."""
    return any(span.start < cell < span.end for span in spans)


def held_spans(facts: MediaFacts | None, media: Iterable[MediaSpan], start: int) -> tuple[CellSpan, ...]:
    """Return the spans of what begins at the cell ``start`` that a sequence must not be cut within."""
    if facts is None or not facts.atomic:
        return ()
    return tuple(CellSpan(start + one.offset, start + one.end, one.positions) for one in media)


def spans_before(spans: Sequence[CellSpan], length: int) -> tuple[CellSpan, ...]:
    """Return the spans in the first ``length`` cells."""
    return tuple(span for span in spans if span.end <= length)


def position_of(spans: Sequence[CellSpan], cell: int) -> int:
    """Return the position of a cell that is not within a span, but may be the first of one."""
    return cell + sum(span.positions - (span.end - span.start) for span in spans if span.end <= cell)


def positions_of(spans: Sequence[CellSpan], start: int, end: int) -> Ids:
    """Return the positions of the cells [start, end). All of a span have that of its first one."""
    cells = np.arange(start, end, dtype=np.int32)
    found = cells.copy()
    for span in spans:
        inside = (cells >= span.start) & (cells < span.end)
        found[inside] -= cells[inside] - span.start
        found[cells >= span.end] += span.positions - (span.end - span.start)
    return found


def cell_count(spans: Sequence[CellSpan], position: int) -> int:
    """Return how many cells a sequence has whose last one has ``position``, where a span has that of its first cell."""
    for span in reversed(spans):
        if position >= position_of(spans, span.start):
            return max(span.end, position + 1 + span.end - position_of(spans, span.end))
    return position + 1


Slices = Sequence[EncodedSlice]


class MediaStore:
    """Slices of media by the media's ids, ``capacity`` bytes at most. Any thread may call it.

    ``size``: bytes held now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, Slices] = OrderedDict()

    def find(self, media_id: bytes) -> Slices | None:
        """Return the slices of a medium, which becomes the last one to be forgotten; None if they are not here."""
        with self._lock:
            found = self._held.get(media_id)
            if found is not None:
                self._held.move_to_end(media_id)
            return found

    def put(self, media_id: bytes, slices: Slices) -> bool:
        """Keep the slices of a medium, in place of others if need be; False if they do not fit at all."""
        needed = _bytes_of(slices)
        if needed > self.capacity:
            return False
        with self._lock:
            old = self._held.pop(media_id, ())
            self.size += needed - _bytes_of(old)
            while self.size > self.capacity:
                _, forgotten = self._held.popitem(last=False)
                self.size -= _bytes_of(forgotten)
            self._held[media_id] = slices
        return True


def _bytes_of(slices: Slices) -> int:
    return sum(one.size_bytes for one in slices)

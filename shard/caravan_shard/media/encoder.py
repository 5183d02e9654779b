"""The protocol of what turns pictures and sound into embeddings, and the types that it uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from caravan_proto.messages.media import MediaFacts, MediaShape
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

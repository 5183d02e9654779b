"""Prompts of embeddings: what the model reads in place of tokens is given, and needs no encoder."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from caravan_proto.limits import MAX_EMBEDDING_VALUE, MAX_MEDIA_BYTES
from caravan_proto.messages.media import MediaFacts, MediaKind, MediaShape
from caravan_shard.media import EncodedSlice, EncodingError, MediaEncoder, MediumTokens, SliceSize

# Of a slice that may be cut.
_MOST_CELLS = 1 << 16
_NO_PROJECTOR = MediaFacts(
    images=False, audio=False, atomic=False, max_cells=_MOST_CELLS, fingerprint=b"", max_bytes=MAX_MEDIA_BYTES
)


class EmbeddingsEncoder:
    """A MediaEncoder of embeddings, and of what ``projector`` encodes, which is closed with it."""

    def __init__(self, input_size: int, projector: MediaEncoder | None) -> None:
        """``input_size``: values that the model reads in place of a token."""
        self._projector = projector
        facts = _NO_PROJECTOR if projector is None else projector.facts
        # Shards that have the projector alone cannot take over prompts of embeddings.
        fingerprint = hashlib.sha256(b"embeddings" + facts.fingerprint).digest()
        self.facts = replace(facts, input_size=input_size, fingerprint=fingerprint)

    def tokenize(self, shape: MediaShape) -> MediumTokens:
        if shape.kind is not MediaKind.EMBEDDINGS:
            return self._of_files(shape).tokenize(shape)
        # Where a slice is computed whole, as many as fit into a step.
        return [SliceSize(end - first, end - first) for first, end in slices_of_rows(shape.rows, self.facts.max_cells)]

    def encode(self, shape: MediaShape, data: bytes) -> Sequence[EncodedSlice]:
        if shape.kind is not MediaKind.EMBEDDINGS:
            return self._of_files(shape).encode(shape, data)
        rows = np.frombuffer(data, "<f4").astype(np.float32).reshape(shape.rows, shape.row_size)
        # Also False for what is not a number: that would be in the cells of others.
        if not (np.abs(rows) <= MAX_EMBEDDING_VALUE).all():
            raise EncodingError(f"its values are not all between -{MAX_EMBEDDING_VALUE:g} and {MAX_EMBEDDING_VALUE:g}")
        return [
            EncodedSlice(embeddings=rows[first:end], size=SliceSize(end - first, end - first))
            for first, end in slices_of_rows(shape.rows, self.facts.max_cells)
        ]

    def _of_files(self, shape: MediaShape) -> MediaEncoder:
        if self._projector is None:
            raise EncodingError(f"there is no projector, so this model does not read {shape.kind}")
        return self._projector

    def close(self) -> None:
        """Free the projector."""
        if self._projector is not None:
            self._projector.close()


def slices_of_rows(count: int, most: int) -> list[tuple[int, int]]:
    """Return the rows [first, end) of each slice of embeddings, at most ``most`` of ``count``."""
    return [(first, min(count, first + most)) for first in range(0, count, most)]

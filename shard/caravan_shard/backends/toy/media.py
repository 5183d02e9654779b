"""The toy's encoder: its pictures and sounds spell text, so that a prompt with media has the output of its text.

A picture has a cell for each patch of 4 x 4 pixels, and a sound for each 400 samples. The cell stands for the byte that
is the red of the patch's first pixel, or the first sample times 256. Around a medium, the toy wants no tokens.
"""

import hashlib
import threading
from collections.abc import Sequence

import numpy as np

from caravan_proto.limits import MAX_MEDIA_BYTES
from caravan_proto.messages.media import MediaFacts, MediaKind, MediaShape
from caravan_shard.arrays import Floats
from caravan_shard.media import EncodedSlice, MediumTokens, SliceSize

PATCH = 4
HOP = 400
# A picture with more cells has several slices.
SLICE_CELLS = 64


class ToyEncoder:
    """A MediaEncoder. Encoding takes ``seconds``. ``count``: media encoded so far.

    ``atomic``: a slice is computed whole, and takes as many positions as a square of so many cells has on a side.
    """

    def __init__(self, *, atomic: bool = False, seconds: float = 0.0) -> None:
        self.facts = MediaFacts(
            images=True,
            audio=True,
            atomic=atomic,
            max_cells=SLICE_CELLS,
            fingerprint=hashlib.sha256(b"toy").digest(),
            audio_sample_rate=16_000,
            max_bytes=MAX_MEDIA_BYTES,
        )
        self.count = 0
        self._seconds = seconds
        self._waits = threading.Event()

    def tokenize(self, shape: MediaShape) -> MediumTokens:
        cells = _cells(shape)
        return [self._size(min(SLICE_CELLS, cells - first)) for first in range(0, cells, SLICE_CELLS)]

    def _size(self, cells: int) -> SliceSize:
        return SliceSize(cells, max(1, int(cells**0.5)) if self.facts.atomic else cells)

    def encode(self, shape: MediaShape, data: bytes) -> Sequence[EncodedSlice]:
        self._waits.wait(self._seconds)
        self.count += 1
        spelled = toy_bytes(shape, data)
        parts = [spelled[first : first + SLICE_CELLS] for first in range(0, len(spelled), SLICE_CELLS)]
        return [EncodedSlice(embeddings=part.reshape(-1, 1), size=self._size(len(part))) for part in parts]

    def stop(self) -> None:
        """Encode at once from now on."""
        self._waits.set()

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def toy_bytes(shape: MediaShape, data: bytes) -> Floats:
    """Return the bytes that a medium spells, as numbers."""
    if shape.kind is MediaKind.IMAGE:
        pixels = np.frombuffer(data, np.uint8).reshape(shape.height, shape.width, 3)
        return pixels[::PATCH, ::PATCH, 0].reshape(-1).astype(np.float32)
    samples = np.frombuffer(data, "<f4")[::HOP]
    return np.clip(np.round(samples * 256), 0, 255).astype(np.float32)


def _cells(shape: MediaShape) -> int:
    if shape.kind is MediaKind.IMAGE:
        return -(-shape.width // PATCH) * -(-shape.height // PATCH)
    return -(-shape.samples // HOP)

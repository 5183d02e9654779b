"""Pictures, sounds and embeddings of prompts, decoded. A prompt with some is a tuple of texts and media, in order."""

import hashlib
from dataclasses import dataclass, field
from typing import Self

# Bytes of a sample, or of a value of an embedding: a little-endian float.
SAMPLE_BYTES = 4


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Picture:
    """The pixels of a picture, row by row, three bytes each. ``id`` is a digest of size and pixels: see `of`."""

    id: bytes
    width: int
    height: int
    rgb: bytes

    @classmethod
    def of(cls, width: int, height: int, rgb: bytes) -> "Picture":
        """Return the picture of these pixels, under the id that equal pixels always have."""
        if len(rgb) != 3 * width * height:
            raise ValueError(f"{width} x {height} pixels have {3 * width * height} bytes. Given: {len(rgb)}")
        return cls(_digest("picture", width, height, rgb), width, height, rgb)

    @property
    def size_bytes(self) -> int:
        """How much memory its content takes."""
        return len(self.rgb)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Sound:
    """The ``samples`` of one channel, each a little-endian 32-bit float. ``id`` is a digest of rate and samples."""

    id: bytes
    sample_rate: int
    samples: bytes

    @classmethod
    def of(cls, sample_rate: int, samples: bytes) -> "Sound":
        """Return the sound of these samples, under the id that equal samples always have."""
        if len(samples) % SAMPLE_BYTES:
            raise ValueError(f"samples have {SAMPLE_BYTES} bytes each. Given: {len(samples)} bytes")
        return cls(_digest("sound", sample_rate, len(samples) // SAMPLE_BYTES, samples), sample_rate, samples)

    @property
    def count(self) -> int:
        """The number of its samples."""
        return len(self.samples) // SAMPLE_BYTES

    @property
    def size_bytes(self) -> int:
        """How much memory its content takes."""
        return len(self.samples)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Embeddings:
    """Rows that a model reads in place of tokens: ``count`` of ``size`` little-endian 32-bit floats each.

    ``id``: a digest of size and values, see `of_bytes`.
    """

    id: bytes = field(repr=False)
    count: int
    size: int
    data: bytes = field(repr=False)

    @classmethod
    def of_bytes(cls, count: int, size: int, data: bytes) -> Self:
        """Return the embeddings of these values, under the id that equal values always have."""
        if len(data) != SAMPLE_BYTES * count * size:
            raise ValueError(f"{count} x {size} values have {SAMPLE_BYTES * count * size} bytes. Given: {len(data)}")
        return cls(_digest("embeddings", count, size, data), count, size, data)

    @property
    def size_bytes(self) -> int:
        """How much memory they take."""
        return len(self.data)


Media = Picture | Sound | Embeddings
# Texts and media in the order in which the model reads them. Texts that follow each other are tokenized separately.
MediaPrompt = tuple[str | Media, ...]


def _digest(kind: str, first: int, second: int, content: bytes) -> bytes:
    digest = hashlib.sha256(f"{kind} {first} {second}\n".encode())
    digest.update(content)
    return digest.digest()

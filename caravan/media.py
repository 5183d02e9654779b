"""What counts as an image, audio or embeddings in a prompt, and the file that an image or audio makes."""

import hashlib
import io
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from caravan.errors import RequestError
from caravan_scheduler.core.media import SAMPLE_BYTES, Media, Picture, Sound

__all__ = ["Embeddings", "Picture", "PillowImage", "PromptMedia", "Sound", "embeddings_of", "media_of"]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Rows that a model reads in place of tokens: ``count`` of ``size`` little-endian 32-bit floats. See `of`.

    ``id``: a digest of size and values.
    """

    id: bytes = field(repr=False)
    count: int
    size: int
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, rows: Any) -> Self:
        """Return the embeddings of an array [tokens, size] of floats. Raises RequestError."""
        found = np.asarray(rows)
        if found.ndim != 2 or not found.size or not np.issubdtype(found.dtype, np.floating):
            raise RequestError(f"embeddings must be floats [tokens, size]. Given: {found.dtype} {list(found.shape)}")
        values = np.ascontiguousarray(found, "<f4")
        if not np.isfinite(values).all():
            raise RequestError("embeddings must be finite")
        count, size = found.shape
        return cls.of_bytes(count, size, values.tobytes())

    @classmethod
    def of_bytes(cls, count: int, size: int, data: bytes) -> Self:
        """Return the embeddings with these values."""
        digest = hashlib.sha256(f"embeddings {count} {size}\n".encode())
        digest.update(data)
        return cls(digest.digest(), count, size, data)

    @property
    def rows(self) -> NDArray[np.float32]:
        """The values [tokens, size]."""
        return np.frombuffer(self.data, "<f4").reshape(self.count, self.size)

    @property
    def size_bytes(self) -> int:
        """How much memory they take."""
        return len(self.data)


def embeddings_of(value: Any) -> Embeddings | None:
    """Return the embeddings that ``value`` is, which may be an array of floats; else None. Raises RequestError."""
    if isinstance(value, Embeddings):
        return value
    if isinstance(value, np.ndarray) and value.ndim and np.issubdtype(value.dtype, np.floating):
        return Embeddings.of(value)
    return None


@runtime_checkable
class PillowImage(Protocol):
    """A Pillow image, which this package does not need."""

    @property
    def size(self) -> tuple[int, int]: ...
    def convert(self, mode: str) -> Any: ...
    def tobytes(self) -> bytes: ...


PromptMedia = Picture | Sound | PillowImage


def media_of(value: Any) -> Media | None:
    """Return the image or audio that ``value`` is; None if it is neither."""
    if isinstance(value, Picture | Sound):
        return value
    if isinstance(value, PillowImage):
        return Picture.of(*value.size, value.convert("RGB").tobytes())
    return None


def file_of(value: Any) -> bytes:
    """Return an image or audio as a file. Raises RequestError if ``value`` is neither."""
    if isinstance(value, PillowImage):
        return _saved(value)
    media = media_of(value)
    if media is None:
        raise RequestError(f"a part of a message is a text, an image, audio or an object. Given: {value!r:.80}")
    return _wav(media) if isinstance(media, Sound) else _png(media)


def _saved(image: Any) -> bytes:
    """Return a Pillow image as a file; what is transparent stays transparent, for the model's server to decide."""
    data = io.BytesIO()
    (image if image.mode in ("RGB", "RGBA", "L") else image.convert("RGBA")).save(data, "PNG")
    return data.getvalue()


def _png(picture: Picture) -> bytes:
    row = 3 * picture.width
    lines = b"".join(b"\0" + picture.rgb[at : at + row] for at in range(0, len(picture.rgb), row))
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _wav(sound: Sound) -> bytes:
    """Return the file of one channel of 32-bit floats."""
    rate, size = sound.sample_rate, len(sound.samples)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES)
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + size, b"WAVE") + form + struct.pack("<4sI", b"data", size) + sound.samples
    )

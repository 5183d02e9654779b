"""What counts as an image or audio in a prompt, and the file that each makes."""

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from caravan.errors import RequestError
from caravan_scheduler.core.media import SAMPLE_BYTES, Embeddings, Picture, Sound

__all__ = ["Picture", "PillowImage", "PlacedMedia", "PromptMedia", "Sound", "media_of"]


@runtime_checkable
class PillowImage(Protocol):
    """A Pillow image, which this package does not need."""

    @property
    def size(self) -> tuple[int, int]: ...
    def convert(self, mode: str) -> Any: ...
    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """An image or audio among the tokens of a conversation: what stands for it is ``tokens[start:stop]``."""

    media: Picture | Sound
    start: int
    stop: int


PromptMedia = Picture | Sound | PillowImage


def media_of(value: Any) -> Picture | Sound | None:
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


def npy_of(embeddings: Embeddings) -> bytes:
    """Return embeddings as the file that numpy.save writes."""
    shape = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({embeddings.count}, {embeddings.size}), }}"
    # The values begin at a multiple of 64 bytes.
    line = shape.ljust(-(10 + len(shape) + 1) % 64 + len(shape)) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line.encode() + embeddings.data


def _wav(sound: Sound) -> bytes:
    """Return the file of one channel of 32-bit floats."""
    rate, size = sound.sample_rate, len(sound.samples)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES)
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + size, b"WAVE") + form + struct.pack("<4sI", b"data", size) + sound.samples
    )

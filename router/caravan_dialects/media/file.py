"""A file of a picture, a sound or embeddings, as a client sent it: what it may be, and what can be wrong with it.

The limits bound what a decoder does for one file, whatever is in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from caravan_proto.limits import MAX_MEDIA_BYTES

MAX_PICTURE_BYTES = 10 << 20
MAX_PICTURE_PIXELS = 50_000_000
MIN_SIDE = 2
# Longer sides are scaled down: no encoder looks at more.
MAX_SIDE = 2048
# Encoders cut a picture into squares, or scale it to one.
MAX_SIDE_RATIO = 200

MAX_SOUND_BYTES = 25 << 20
# What OpenAI's API demands. Some encoders read past the end of shorter sounds.
MIN_SOUND_S = 0.1
MAX_SOUND_S = 600
MAX_SAMPLE = 16.0

# Of 64-bit floats, which become half as large.
MAX_EMBEDDINGS_BYTES = 2 * MAX_MEDIA_BYTES + (64 << 10)

TIME_LIMIT_S = 10.0
# A picture of the most pixels takes 200 MB, and is in memory up to six times while a WebP file is decoded.
DECODER_MEMORY_BYTES = 3 << 29

# Of media whose files may come again. The largest picture has 12 MiB.
REMEMBERED_BYTES = 128 << 20

PICTURES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
SOUNDS = {"WAV": "audio/wav", "MP3": "audio/mpeg", "FLAC": "audio/flac"}

_STARTS = {
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "FLAC": (b"fLaC",),
    "MP3": (b"ID3", *(bytes((0xFF, second)) for second in (0xFB, 0xFA, 0xF3, 0xF2, 0xE3, 0xE2))),
}
# These begin with RIFF, a size, and what they are.
_RIFF = {b"WEBP": "WEBP", b"WAVE": "WAV"}


def format_of(data: bytes) -> str | None:
    """Return the name of the format, a key of PICTURES or SOUNDS; None if it is neither."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12])
    return next((name for name, starts in _STARTS.items() if data.startswith(starts)), None)


def are_within(floats: Sequence[float], most: float) -> bool:
    """Whether all ``floats``, of which there are some, are numbers between -``most`` and ``most``."""
    # A comparison with what is no number is false, so that it may be neither the least nor the largest.
    return math.isfinite(sum(floats)) and min(floats) >= -most and max(floats) <= most


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file in base64 if ``data`` is a text, or as it is.

    ``sample_rate``: that of the sound to make of it. ``row_size``: how many values each embedding in it has. Both are 0
    if it is to be a picture.
    """

    data: str | bytes
    sample_rate: int = 0
    row_size: int = 0

    @property
    def most_bytes(self) -> int:
        """How large such a file may be."""
        if self.row_size:
            return MAX_EMBEDDINGS_BYTES
        return MAX_SOUND_BYTES if self.sample_rate else MAX_PICTURE_BYTES

    @property
    def size_bytes(self) -> int:
        """How large the file is, at least."""
        return len(self.data) if isinstance(self.data, bytes) else len(self.data) * 3 // 4 - 2


class Reason(Enum):
    """Why a file was refused, as the metric of refused files has it."""

    ENCODING = "encoding"
    FORMAT = "format"
    SIZE = "size"
    BROKEN = "broken"
    TIME = "time"
    MEMORY = "memory"
    DECODER = "decoder"


class MediaFileError(Exception):
    """The file is refused. The message goes on after the name of the field that has it."""

    def __init__(self, reason: Reason, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``data``: the file, in ``base64`` or as it is. The other fields are those of `MediaFile`."""

    data: bytes
    base64: bool
    sample_rate: int
    row_size: int = 0


class DecodeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``content``, with ``width`` and ``height`` if it is a picture; or why there is none: a `Reason` and words."""

    content: bytes = b""
    width: int = 0
    height: int = 0
    reason: str = ""
    problem: str = ""

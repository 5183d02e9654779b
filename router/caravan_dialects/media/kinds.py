"""Tells by its first bytes what a file is. Names and media types that clients give are not believed."""

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

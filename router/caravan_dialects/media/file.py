"""A file of a picture or a sound, as a client sent it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file in base64 if ``data`` is a text, or as it is. ``sample_rate``: that of the sound to make of it.

    The rate is 0 if it is to be a picture.
    """

    data: str | bytes
    sample_rate: int = 0

    @property
    def size_bytes(self) -> int:
        """How large the file is, at least."""
        return len(self.data) if isinstance(self.data, bytes) else len(self.data) * 3 // 4 - 2

"""What counts as an image or audio in a prompt."""

from typing import Any, Protocol, runtime_checkable

from caravan_scheduler.core.media import Media, Picture, Sound

__all__ = ["Picture", "PillowImage", "PromptMedia", "Sound", "media_of"]


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

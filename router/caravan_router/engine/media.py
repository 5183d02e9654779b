"""What shards are told of media, and the contents of the media of requests that have not ended."""

import weakref
from collections.abc import Sequence

from caravan_proto.messages.media import MediaKind, MediaShape, PromptPart, TextPart
from caravan_scheduler.core.errors import TooMuchMediaError
from caravan_scheduler.core.media import Embeddings, Media, MediaPrompt, Picture

# Contents of all requests together.
MOST_BYTES = 1 << 30


def shape_of(media: Media) -> MediaShape:
    """Return a medium without its content."""
    if isinstance(media, Picture):
        return MediaShape(media_id=media.id, kind=MediaKind.IMAGE, width=media.width, height=media.height)
    if isinstance(media, Embeddings):
        return MediaShape(media_id=media.id, kind=MediaKind.EMBEDDINGS, rows=media.count, row_size=media.size)
    return MediaShape(media_id=media.id, kind=MediaKind.AUDIO, samples=media.count)


def content_of(media: Media) -> bytes:
    """Return the content of a medium."""
    if isinstance(media, Picture):
        return media.rgb
    return media.data if isinstance(media, Embeddings) else media.samples


def parts_of(prompt: MediaPrompt, *, add_special: bool, parse_special: bool) -> Sequence[PromptPart]:
    """Return the parts of ``prompt`` without contents. ``add_special``: begin it as the model wants it to begin."""
    parts: list[PromptPart] = []
    if add_special and not isinstance(prompt[0], str):
        parts.append(TextPart("", add_special=True))
    for part in prompt:
        if isinstance(part, str):
            parts.append(TextPart(part, add_special=add_special and not parts, parse_special=parse_special))
        else:
            parts.append(shape_of(part))
    return parts


class MediaShelf:
    """Requests hold their media; equal media of several requests are one object. What no request holds is gone."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._media: weakref.WeakValueDictionary[bytes, Media] = weakref.WeakValueDictionary()

    @property
    def size_bytes(self) -> int:
        """Bytes of all media that requests hold."""
        return sum(media.size_bytes for media in self._media.values())

    def kept(self, prompt: MediaPrompt) -> MediaPrompt:
        """Return ``prompt`` with media that equal those of other requests. Raises TooMuchMediaError."""
        new = {part.id: part for part in prompt if not isinstance(part, str) and part.id not in self._media}
        size = self.size_bytes + sum(media.size_bytes for media in new.values())
        if new and size > self._most_bytes:
            raise TooMuchMediaError(self._most_bytes, size)
        return tuple(part if isinstance(part, str) else self._media.setdefault(part.id, part) for part in prompt)

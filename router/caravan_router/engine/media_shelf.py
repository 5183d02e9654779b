"""The contents of the media of requests that have not ended: each medium once, and limited in bytes."""

import weakref

from caravan_scheduler.core.errors import TooMuchMediaError
from caravan_scheduler.core.media import Media, MediaPrompt

# Contents of all requests together.
MOST_BYTES = 1 << 30


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

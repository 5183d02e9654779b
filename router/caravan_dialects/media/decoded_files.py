"""Remembers what files became, since agents send the same pictures again with every turn."""

import hashlib
from collections import OrderedDict

from caravan_dialects.media.file import MediaFile
from caravan_scheduler.core.media import Media


class DecodedFiles:
    """The media of the files that were used last, up to ``max_bytes`` of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._media: OrderedDict[bytes, Media] = OrderedDict()

    def find(self, key: bytes) -> Media | None:
        """Return the medium of the file that has this key."""
        if key in self._media:
            self._media.move_to_end(key)
        return self._media.get(key)

    def add(self, key: bytes, medium: Media) -> None:
        """Remember ``medium``, and forget others for it."""
        if key in self._media:
            return
        self._media[key] = medium
        self._bytes += medium.size_bytes
        while self._bytes > self._max_bytes:
            _, oldest = self._media.popitem(last=False)
            self._bytes -= oldest.size_bytes


def key_of(file: MediaFile, owner: str) -> bytes:
    """Return a digest of ``file``. Each owner has keys of its own: none can find out what others have sent."""
    digest = hashlib.sha256(f"{owner}\0{file.sample_rate}\0{isinstance(file.data, str)}\0".encode())
    digest.update(file.data.encode("utf-8", "surrogatepass") if isinstance(file.data, str) else file.data)
    return digest.digest()

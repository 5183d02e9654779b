"""Embeddings of media, of which the least recently used ones are forgotten."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from caravan_shard.media.encoder import EncodedSlice

Slices = Sequence[EncodedSlice]


class MediaStore:
    """Slices of media by the media's ids, ``capacity`` bytes at most. Any thread may call it.

    ``size``: bytes held now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.size = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, Slices] = OrderedDict()

    def find(self, media_id: bytes) -> Slices | None:
        """Return the slices of a medium, which becomes the last one to be forgotten; None if they are not here."""
        with self._lock:
            found = self._held.get(media_id)
            if found is not None:
                self._held.move_to_end(media_id)
            return found

    def put(self, media_id: bytes, slices: Slices) -> bool:
        """Keep the slices of a medium, in place of others if need be; False if they do not fit at all."""
        needed = _bytes_of(slices)
        if needed > self.capacity:
            return False
        with self._lock:
            old = self._held.pop(media_id, ())
            self.size += needed - _bytes_of(old)
            while self.size > self.capacity:
                _, forgotten = self._held.popitem(last=False)
                self.size -= _bytes_of(forgotten)
            self._held[media_id] = slices
        return True


def _bytes_of(slices: Slices) -> int:
    return sum(one.size_bytes for one in slices)

"""Media that shards encode for requests that wait for it."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The shard ``shard`` encodes a medium, of which prompts have ``cells`` cells."""

    encode_id: int
    shard: str
    media_id: bytes
    cells: int


class Encodings:
    """The encodings under way. A shard encodes one medium after another, in the order in which they were begun."""

    def __init__(self, last_id: int = 0) -> None:
        """``last_id``: the last one that was given before."""
        # By id, in the order in which they were begun.
        self._under_way: dict[int, Encoding] = {}
        # By request id, the encodings that it waits for.
        self._awaited: dict[int, set[int]] = {}
        self._last_id = last_id
        # The shards that were lost while they encoded an image or audio clip, by its id.
        self._lost: dict[bytes, list[str]] = {}

    def under_way(self, shard: str) -> list[Encoding]:
        """Return what ``shard`` encodes, the first one now."""
        return [one for one in self._under_way.values() if one.shard == shard]

    def are_awaited_by(self, request_id: int) -> bool:
        """Whether a request waits for media to be encoded."""
        return request_id in self._awaited

    def deadly(self, most_losses: int) -> frozenset[bytes]:
        """Return the media during whose encoding shards were lost so many times or more."""
        return frozenset(media_id for media_id, shards in self._lost.items() if len(shards) >= most_losses)

    # Changes

    @property
    def last_id(self) -> int:
        """The last id that was given."""
        return self._last_id

    def begin(self, shard: str, media_id: bytes, cells: int) -> Encoding:
        """Note an encoding that begins."""
        self._last_id += 1
        encoding = Encoding(encode_id=self._last_id, shard=shard, media_id=media_id, cells=cells)
        self._under_way[encoding.encode_id] = encoding
        return encoding

    def let_wait(self, request_id: int, encode_ids: Collection[int]) -> None:
        """Note that a request waits until these encodings have ended."""
        self._awaited[request_id] = set(encode_ids)

    def end(self, encode_id: int) -> tuple[Encoding, list[int]] | None:
        """Forget an encoding. Return it, and the requests that have waited for it; None if it is unknown."""
        encoding = self._under_way.pop(encode_id, None)
        if encoding is None:
            return None
        requests = [request_id for request_id, ids in self._awaited.items() if encode_id in ids]
        for request_id in requests:
            self._awaited[request_id].discard(encode_id)
            if not self._awaited[request_id]:
                del self._awaited[request_id]
        return encoding, requests

    def forget(self, request_id: int) -> None:
        """Note that a request waits for nothing any more. What was begun for it goes on."""
        self._awaited.pop(request_id, None)

    def lose(self, shard: str, *, is_blamed: bool) -> None:
        """Forget what a shard encodes that is gone. ``is_blamed``: what it encoded then may be why."""
        under_way = self.under_way(shard)
        if under_way and is_blamed:
            self._lost.setdefault(under_way[0].media_id, []).append(shard)
        for encoding in under_way:
            self.end(encoding.encode_id)

    def forgive(self, shard: str) -> None:
        """Count the losses of a shard against no medium: it did not die."""
        for shards in self._lost.values():
            shards[:] = [one for one in shards if one != shard]

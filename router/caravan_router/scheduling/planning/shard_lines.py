"""Requests that wait for one busy shard, which has their prefix, though another could start them."""

import heapq
from collections.abc import Iterator

from caravan_router.scheduling.sequence import Sequence


class ShardLines:
    """A line of requests for each shard. Nobody asks for a place for them until they are called.

    Requests that were cancelled meanwhile stay in their line until then.
    """

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, Sequence]] = {}
        # When each stops waiting, its id, and the shard.
        self._until: list[tuple[float, int, str]] = []

    def join(self, shard: str, sequence: Sequence, until_s: float) -> None:
        """Let ``sequence`` wait for ``shard`` until ``until_s``."""
        self._lines.setdefault(shard, {})[sequence.request_id] = sequence
        heapq.heappush(self._until, (until_s, sequence.request_id, shard))

    def length(self, shard: str) -> int:
        """Return how many wait for ``shard``."""
        return len(self._lines.get(shard, ()))

    def call(self, shard: str, count: int) -> list[Sequence]:
        """Take the first ``count`` out of the line of ``shard``: by priority, then by arrival."""
        line = self._lines.get(shard)
        if line is None:
            return []
        found = sorted(line.values(), key=lambda one: (-one.spec.priority, one.request_id))[:count]
        for sequence in found:
            self._leave(shard, sequence.request_id)
        return found

    def call_late(self, now: float) -> Iterator[Sequence]:
        """Take out those whose time is over."""
        while self._until and self._until[0][0] <= now:
            _, request_id, shard = heapq.heappop(self._until)
            if request_id in self._lines.get(shard, ()):
                yield self._leave(shard, request_id)

    def call_all(self) -> list[Sequence]:
        """Take out all."""
        found = [sequence for line in self._lines.values() for sequence in line.values()]
        self._lines.clear()
        self._until.clear()
        return found

    def _leave(self, shard: str, request_id: int) -> Sequence:
        line = self._lines[shard]
        sequence = line.pop(request_id)
        if not line:
            del self._lines[shard]
        return sequence

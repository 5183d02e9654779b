"""Requests that wait for one busy shard, which has their prefix, though another could start them."""

import heapq
from collections.abc import Iterator

from caravan_scheduler.sequence import Sequence


class ShardQueues:
    """A queue for each shard. Nobody looks for a place for its requests until they are taken out.

    Requests that were cancelled meanwhile stay in their queue until then.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[int, Sequence]] = {}
        # When each stops waiting, its id, and the shard.
        self._until: list[tuple[float, int, str]] = []

    def push(self, shard: str, sequence: Sequence, until_s: float) -> None:
        """Let ``sequence`` wait for ``shard`` until ``until_s``."""
        self._queues.setdefault(shard, {})[sequence.request_id] = sequence
        heapq.heappush(self._until, (until_s, sequence.request_id, shard))

    def length(self, shard: str) -> int:
        """Return how many wait for ``shard``."""
        return len(self._queues.get(shard, ()))

    def shard_of(self, request_id: int) -> str | None:
        """Return the shard for which a request waits; None if it waits for none."""
        return next((shard for shard, queue in self._queues.items() if request_id in queue), None)

    def pop(self, shard: str, count: int | None = None) -> list[Sequence]:
        """Take out the first ``count`` that wait for ``shard``, by priority, then by arrival; None: all."""
        queue = self._queues.get(shard, {})
        found = sorted(queue.values(), key=lambda one: (-one.spec.priority, one.request_id))[:count]
        for sequence in found:
            del queue[sequence.request_id]
        return found

    def pop_late(self, now: float) -> Iterator[Sequence]:
        """Take out those whose time is over."""
        while self._until and self._until[0][0] <= now:
            _, request_id, shard = heapq.heappop(self._until)
            sequence = self._queues.get(shard, {}).pop(request_id, None)
            if sequence is not None:
                yield sequence

    def pop_all(self) -> list[Sequence]:
        """Take out all."""
        found = [sequence for queue in self._queues.values() for sequence in queue.values()]
        self._queues.clear()
        self._until.clear()
        return found

"""When requests become too late: to start, or to end."""

import heapq
import math
from collections.abc import Iterator

from caravan_router.scheduling.actions import FailureReason
from caravan_router.scheduling.sequence import Request


class Deadlines:
    """The next one is known at once. A request that has ended meanwhile is named all the same: the caller knows."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, FailureReason]] = []

    def add(self, request: Request) -> None:
        """Remember by when ``request`` must start and end."""
        for at, reason in (
            (request.start_by_s, FailureReason.QUEUE_TIMEOUT),
            (request.end_by_s, FailureReason.DEADLINE),
        ):
            if at < math.inf:
                heapq.heappush(self._heap, (at, request.request_id, reason))

    def due(self, now: float) -> Iterator[tuple[int, FailureReason]]:
        """Requests whose time is over, each deadline once."""
        while self._heap and self._heap[0][0] <= now:
            _, request_id, reason = heapq.heappop(self._heap)
            yield request_id, reason

"""The times by which requests must start and end."""

import heapq
import math
from collections.abc import Iterator

from caravan_scheduler.actions import FailureReason
from caravan_scheduler.sequence import Request


class Deadlines:
    """Yields each deadline once when it has passed, even if its request has ended or started in time."""

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
        """Yield the requests whose deadlines have passed since the last call."""
        while self._heap and self._heap[0][0] <= now:
            _, request_id, reason = heapq.heappop(self._heap)
            yield request_id, reason

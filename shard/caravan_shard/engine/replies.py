"""Carries the results of one command from the worker's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

from caravan_shard.protocol.results import Result

# The most results of a Decode that wait to be taken. Enough to hide scheduling hiccups, and few enough that a router
# that has stopped reading does not get many steps computed that it may never want.
RUN_AHEAD = 16


class Replies:
    """Results in order, then an end. Each method names the side that may call it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]) -> None:
        """``on_change`` is called on the event loop when there is room again or the caller has gone."""
        self._loop = loop
        self._on_change = on_change
        self._arrived: deque[Result | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._put = 0
        self._taken = 0
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Either side: whether nobody waits for more results."""
        return self._cancelled

    @property
    def has_room(self) -> bool:
        """Worker: whether another result may be put."""
        return self._put - self._taken < RUN_AHEAD

    def put(self, result: Result) -> None:
        """Worker: send a result."""
        self._put += 1
        self._loop.call_soon_threadsafe(self._arrive, result)

    def end(self) -> None:
        """Worker: send the end."""
        self._loop.call_soon_threadsafe(self._arrive, None)

    def cancel(self) -> None:
        """Loop: tell the worker that the caller has gone or wants no more."""
        if not self._cancelled:
            self._cancelled = True
            self._on_change()

    async def next(self) -> Result | None:
        """Loop: wait for the next result; None at the end."""
        while not self._arrived:
            self._waiter = self._loop.create_future()
            await self._waiter
        was_full = not self.has_room
        self._taken += 1
        if was_full:
            self._on_change()
        return self._arrived.popleft()

    def _arrive(self, result: Result | None) -> None:
        self._arrived.append(result)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

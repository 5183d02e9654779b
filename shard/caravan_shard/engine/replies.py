"""Carries the results of one command from the worker's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TypeVarTuple

from caravan_shard.protocol.results import Result

Ts = TypeVarTuple("Ts")

# The most groups of results of a Decode that wait to be taken. Enough to hide scheduling hiccups, and few enough that a
# router that has stopped reading does not get many steps computed that it may never want.
RUN_AHEAD = 16
# The most results of a group. A message takes as much processor time as a step of a tiny model.
MOST_TOGETHER = 32


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], object], *args: *Ts) -> None:
    """Let ``loop`` call ``function`` soon. If it is closed, nobody is left to hear of it, and nothing happens.

    A program that closes a model waits for the end of a step for a limited time, then closes its loop.
    """
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


class Replies:
    """Results in order, then an end. Each method names the side that may call it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]) -> None:
        """``on_change`` is called on the event loop when there is room again or the caller has gone."""
        self._loop = loop
        self._on_change = on_change
        self._arrived: deque[Sequence[Result] | None] = deque()
        self._held: list[Result] = []
        self._sent_ns = -(1 << 62)
        self._waiter: asyncio.Future[None] | None = None
        # Groups of results.
        self._sent = 0
        self._taken = 0
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Either side: whether nobody waits for more results."""
        return self._cancelled

    @property
    def has_room(self) -> bool:
        """Worker: whether another result may be put."""
        return self._sent - self._taken < RUN_AHEAD

    @property
    def is_wanted(self) -> bool:
        """Worker: whether there is room for another result, and somebody waits for it."""
        return not self._cancelled and self.has_room

    def put(self, result: Result, *, interval_ns: int = 0) -> None:
        """Worker: send a result, or hold it for the next one if less than ``interval_ns`` passed since the last."""
        self._held.append(result)
        if perf_counter_ns() - self._sent_ns >= interval_ns or len(self._held) >= MOST_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Worker: send the results that are held."""
        if self._held:
            held, self._held = self._held, []
            self._sent_ns = perf_counter_ns()
            self._sent += 1
            call_on(self._loop, self._arrive, held)

    def end(self) -> None:
        """Worker: send what is held, and the end."""
        self.flush()
        call_on(self._loop, self._arrive, None)

    def answer(self, result: Result) -> None:
        """Worker: send the last result, behind what is held, and the end."""
        self.put(result)
        self.end()

    def cancel(self) -> None:
        """Loop: tell the worker that the caller has gone or wants no more."""
        if not self._cancelled:
            self._cancelled = True
            self._on_change()

    async def next(self) -> Sequence[Result] | None:
        """Loop: wait for the next results, at least one; None at the end."""
        while not self._arrived:
            self._waiter = self._loop.create_future()
            await self._waiter
        was_full = not self.has_room
        results = self._arrived.popleft()
        self._taken += results is not None
        if was_full:
            self._on_change()
        return results

    def _arrive(self, results: Sequence[Result] | None) -> None:
        self._arrived.append(results)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""Lets calls with texts pass to the shards in fair turns of the API keys."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from caravan_scheduler.core.engine import TEXT_SENDER, TextSender
from caravan_scheduler.core.generation import BULK_PRIORITY
from caravan_scheduler.text_load import TextLoad
from caravan_scheduler.waiting.text_queue import TextCall, TextQueue

# Longer texts take a thread of a shard for tens of milliseconds, or for seconds.
SHORT_BYTES = 16 << 10


class TextGate:
    """``room`` returns how many tokens all shards that are up may have, see `room_of`; 0 if none is.

    ``load`` is told of the calls that come.
    """

    def __init__(self, queue: TextQueue, room: Callable[[], float], load: TextLoad | None = None) -> None:
        self._queue = queue
        self._load = load or TextLoad()
        self._room = room
        self._call_ids: Iterator[int] = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def passing(self, tokens: int, sender: TextSender, cost: int | None = None) -> AsyncIterator[None]:
        """Wait until it is the turn of a call of ``tokens`` tokens, which is under way for the block.

        ``cost``: see `TextCall`.
        """
        call = TextCall(
            call_id=next(self._call_ids),
            tokens=tokens,
            cost=cost,
            arrived_s=time.monotonic(),
            priority=sender.priority,
            tenant=sender.tenant,
        )
        waiting = 0 if call.priority <= BULK_PRIORITY else tokens
        if waiting:
            self._load.note_call(tokens, call.arrived_s)
        turn = self._waiting[call.call_id] = asyncio.get_running_loop().create_future()
        self._queue.push(call)
        self._load.calls += 1
        try:
            self._start()
            with self._load.wait_of(waiting):
                await turn
            yield
        finally:
            self._load.calls -= 1
            self._waiting.pop(call.call_id, None)
            self._queue.remove(call)
            self._start()

    def _start(self) -> None:
        for call in self._queue.start(self._room(), time.monotonic()):
            turn = self._waiting[call.call_id]
            if not turn.done():  # its caller may have been cancelled in this turn of the loop
                turn.set_result(None)


# A shard has two threads for texts: long ones get one of them, and short ones that come meanwhile go on.
_LONG_AT_ONCE, _SHORT_AT_ONCE = 1, 4


class TextLanes:
    """Calls wait here, and not in a shard, where the first that comes would be the first served.

    ``shards`` returns how many are up. While none is, all pass, since each waits for one on its own.
    """

    def __init__(self, aging_s: float, shards: Callable[[], int]) -> None:
        self._shards = shards
        self._short = TextGate(TextQueue(aging_s), lambda: self._room(_SHORT_AT_ONCE))
        self._long = TextGate(TextQueue(aging_s), lambda: self._room(_LONG_AT_ONCE))

    def passing(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a call with ``size`` bytes of `TEXT_SENDER`'s text, which is under way for the block."""
        gate = self._short if size <= SHORT_BYTES else self._long
        return gate.passing(1, TEXT_SENDER.get(), cost=size)

    def _room(self, of_shard: int) -> float:
        return self._shards() * of_shard or math.inf

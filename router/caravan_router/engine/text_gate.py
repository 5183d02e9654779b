"""Lets calls with texts pass to the shards in the order of a `TextQueue`."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from caravan_scheduler.core.engine import TextSender
from caravan_scheduler.waiting.text_queue import TextCall, TextQueue


class TextGate:
    """``room`` returns how many tokens all shards that are up may have, see `room_of`; 0 if none is."""

    def __init__(self, queue: TextQueue, room: Callable[[], float]) -> None:
        self._queue = queue
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
        turn = self._waiting[call.call_id] = asyncio.get_running_loop().create_future()
        self._queue.push(call)
        try:
            self._start()
            await turn
            yield
        finally:
            self._waiting.pop(call.call_id, None)
            self._queue.remove(call)
            self._start()

    def _start(self) -> None:
        for call in self._queue.start(self._room(), time.monotonic()):
            turn = self._waiting[call.call_id]
            if not turn.done():  # its caller may have been cancelled in this turn of the loop
                turn.set_result(None)

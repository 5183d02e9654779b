"""The requests that wait on one connection: in order within a lane, at the same time in different ones."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from caravan_dialects.api.errors import TooManyTurnsError
from caravan_router.http.server.body import BodyShare

MAX_TURNS = 64
"""Requests of a connection that run or wait."""


@dataclass(slots=True)
class Message:
    """A request as it came. ``share``: what is held for it, until it is released."""

    data: bytes
    lane: str | None
    share: BodyShare

    def take_data(self) -> bytes:
        """Return the data, and forget them."""
        data, self.data = self.data, b""
        return data


class Lanes:
    """``idle``: set while no request runs or waits."""

    def __init__(self, respond: Callable[[Message], Awaitable[None]]) -> None:
        """``respond``: answers a request. It may raise ConnectionError."""
        self._respond = respond
        self._waiting: dict[str | None, deque[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def add(self, message: Message) -> None:
        """Answer ``message`` after all others of its lane. Raises TooManyTurnsError."""
        if self._turns >= MAX_TURNS:
            raise TooManyTurnsError(MAX_TURNS)
        self._turns += 1
        self.idle.clear()
        if (waiting := self._waiting.get(message.lane)) is not None:
            waiting.append(message)
            return
        self._waiting[message.lane] = deque([message])
        task = asyncio.create_task(self._run(message.lane))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, lane: str | None) -> None:
        waiting = self._waiting[lane]
        with suppress(ConnectionError):
            while waiting:
                message = waiting.popleft()
                try:
                    await self._respond(message)
                finally:
                    message.share.release()
                    self._turns -= 1
                    if not self._turns:
                        self.idle.set()
            del self._waiting[lane]

    async def close(self) -> None:
        """End all requests."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for waiting in self._waiting.values():
            for message in waiting:
                message.share.release()

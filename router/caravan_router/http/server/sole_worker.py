"""Work on what is stored that one server at a time may do, and that the next one continues."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from caravan_dialects.sql.connection import Place
from caravan_proto.files import FileLock

_log = logging.getLogger(__name__)

_LOCK_POLL_S = 0.1
# So often, servers that share a database look for what another one has left, and what clients ask of them there.
_SHARED_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Work:
    """``go_on`` continues what another server has left; ``leave`` ends it, so that another one may continue it."""

    go_on: Callable[[], Awaitable[None]]
    leave: Callable[[], Awaitable[None]]


class SoleWorker:
    """Does ``work`` while this server has the lock of a file.

    It gives the lock up when the server begins to end, so that the next one goes on without waiting for the last
    streams. Without a lock, what is stored is this server's alone, or in a database that says which part of it is.
    """

    def __init__(self, place: Place, ending: asyncio.Event, work: Work) -> None:
        """``place``: the file of the lock, the URL of a database, or None. ``ending``: set when the server ends."""
        self._lock = FileLock(place) if isinstance(place, Path) else None
        self._is_shared = isinstance(place, str)
        self._ending = ending
        self._work = work
        self._watching: asyncio.Task[None] | None = None
        self._left = False

    @property
    def may_work(self) -> bool:
        """Whether no other server does the work, and this one has not left it."""
        return not self._left and (self._lock is None or self._lock.is_held)

    async def start(self) -> None:
        """Go on with the work, at once if no other server does it. Raises OSError."""
        if self._lock is not None:
            if self._lock.take():
                await self._work.go_on()
            self._watching = asyncio.create_task(self._watch(self._lock))
        elif self._is_shared:
            await self._work.go_on()
            self._watching = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Go on with what other servers leave, and leave when this one ends."""
        while not await self._ends_within(_SHARED_POLL_S):
            try:
                await self._work.go_on()
            except Exception:  # noqa: BLE001  whatever a bug raises: without the next look, nothing would be cancelled
                _log.exception("what other servers have left cannot be continued")
        await self._leave()

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return self._ending.is_set()

    async def _watch(self, lock: FileLock) -> None:
        """Go on when another server leaves, and leave when this one ends."""
        while not (lock.is_held or self._ending.is_set()):
            if not await self._ends_within(_LOCK_POLL_S) and lock.take():
                await self._work.go_on()
        await self._ending.wait()
        await self._leave()

    async def close(self) -> None:
        """End the work. What is in a file can be continued later."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self._leave()

    async def _leave(self) -> None:
        # What begins now would be missed by `leave`, and go on beside the next server.
        self._left = True
        await self._work.leave()
        if self._lock is not None:
            self._lock.release()


async def end_tasks(tasks: "list[asyncio.Task[None]]") -> None:
    """Cancel ``tasks`` and wait for their ends."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)

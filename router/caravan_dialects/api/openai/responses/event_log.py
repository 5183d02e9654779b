"""The events of a response that is generated in the background: all in the store, and the last ones in memory."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence

from caravan_dialects.conversations.nodes import Step
from caravan_dialects.conversations.store import Store

# Events in memory. Who is further behind reads the store.
_RECENT = 256
# Between two looks at what another server adds.
_POLL_S = 0.2


class LostJobError(Exception):
    """The response was deleted, or another server generates it by now."""


class EventLog:
    """One response's events, each of which readers get when it is stored, and not before.

    So they never see one that is lost, or has another content, when another router continues the response.
    """

    def __init__(self, store: Store, job_id: str, following: int = 0) -> None:
        """``following``: number of the next event."""
        self._store = store
        self._id = job_id
        self._next = following
        self._recent: deque[bytes] = deque(maxlen=_RECENT)
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def following(self) -> int:
        """The number of the next event."""
        return self._next

    async def record(self, step: Step, storing: Awaitable[object]) -> None:
        """Await ``storing``, which stores ``step``, then show its events.

        Raises what ``storing`` raises, and LostJobError if it returns False. A cancellation takes effect afterwards:
        what may be stored already is shown.
        """
        task = asyncio.ensure_future(storing)
        try:
            await asyncio.shield(task)
        finally:
            if not task.done():
                await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
                if task.result() is False:
                    raise LostJobError
                self.show(step.events)

    def show(self, events: Sequence[bytes]) -> None:
        """Show the next events to readers."""
        self._recent += events
        self._next += len(events)
        self._wake()

    def close(self) -> None:
        """Let readers end once they have all events: no more come, at least not here."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def read(self, first: int, ending: asyncio.Event | None = None) -> AsyncIterator[Sequence[bytes]]:
        """Yield the events from the number ``first`` on, several at a time, until there are no more.

        Those that another server adds to a shared store come too, until ``ending`` is set.

        Raises StoreError.
        """
        while True:
            oldest = self._next - len(self._recent)
            if first >= self._next:
                if not self._closed:
                    await self._changed.wait()
                    continue
                if self._store.is_shared:
                    async for stored in self._stored(first, ending or asyncio.Event()):
                        yield stored
                return
            if first >= oldest:
                events: Sequence[bytes] = [*self._recent][first - oldest :]
            else:
                events = await self._store.events(self._id, first)
                if not events:  # It was deleted.
                    return
            yield events
            first += len(events)

    async def _stored(self, first: int, ending: asyncio.Event) -> AsyncIterator[Sequence[bytes]]:
        """Yield the events in the store from the number ``first`` on, until the response has ended."""
        has_ended = False
        while not (has_ended or ending.is_set()):
            # Its last events are there before its end is.
            has_ended = await self._store.on_jobs(lambda jobs: jobs.has_ended(self._id))
            while events := await self._store.events(self._id, first):
                yield events
                first += len(events)
            if not has_ended:
                await asyncio.sleep(_POLL_S)

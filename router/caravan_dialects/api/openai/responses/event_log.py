"""The events of a response that is generated in the background: all in the store, and the last ones in memory."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Sequence

from caravan_dialects.conversations.nodes import Step
from caravan_dialects.conversations.store import Store

# Events in memory. Who is further behind reads the store.
_RECENT = 256


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
        """Await ``storing``, which stores ``step``, then show its events. Raises what ``storing`` raises.

        A cancellation takes effect afterwards: what may be stored already is shown.
        """
        task = asyncio.ensure_future(storing)
        try:
            await asyncio.shield(task)
        finally:
            if not task.done():
                await asyncio.wait({task})
            if not task.cancelled() and task.exception() is None:
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

    async def read(self, first: int) -> AsyncIterator[Sequence[bytes]]:
        """Yield the events from the number ``first`` on, several at a time, until there are no more.

        Raises StoreError.
        """
        while True:
            oldest = self._next - len(self._recent)
            if first >= self._next:
                if self._closed:
                    return
                await self._changed.wait()
                continue
            if first >= oldest:
                events: Sequence[bytes] = [*self._recent][first - oldest :]
            else:
                events = await self._store.events(self._id, first)
                if not events:  # It was deleted.
                    return
            yield events
            first += len(events)

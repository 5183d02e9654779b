"""The responses that are under way: others may read, cancel and fork them, and no two extend one conversation."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from caravan_dialects.api.errors import ConversationBusyError
from caravan_dialects.api.openai.responses.schema import ResponseObject
from caravan_dialects.conversations.nodes import Node


class Progress(Protocol):
    """A response as far as it has come."""

    def response(self) -> ResponseObject:
        """Return the response, with its end as soon as it is computed."""
        ...

    def node(self) -> Node:
        """Return the node that the response would be if it ended now."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class RunningResponse:
    """A response under way.

    ``owner``: name of its API key. ``conversation``: id of the one it extends, or "". ``ended``: set when it has all
    that it gets, and is stored. ``steered``: whether its output ends because another response is to continue it.
    """

    id: str
    owner: str
    conversation: str
    cancelled: bool = False
    steered: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _progress: Progress | None = None
    # As it was before it got an end that is not stored yet.
    _before_end: ResponseObject | None = None
    _scope: asyncio.Timeout | None = None

    @property
    def started(self) -> bool:
        """Whether its request is valid, so that there is something to see."""
        return self._progress is not None

    @property
    def progress(self) -> Progress:
        """The response as far as it has come, once it has started."""
        assert self._progress is not None, "the response has not started"
        return self._progress

    def begin(self, progress: Progress) -> None:
        """Note that the request is valid."""
        self._progress = progress

    def response(self) -> ResponseObject:
        """Return the response as clients see it: with its end once that is stored, since the store may refuse it."""
        if self._before_end is None or self.ended.is_set():
            return self.progress.response()
        return self._before_end

    def note_end(self) -> None:
        """Note that the response gets its end, which is to be stored."""
        shown = self.response()
        self._before_end = msgspec.structs.replace(shown, output=[*shown.output])

    def cancel(self) -> None:
        """End the work of `unless_stopped`, also if it has not begun yet."""
        self.cancelled = True
        self._stop()

    def steer(self) -> None:
        """End the work of `unless_stopped` in the same way: a successor continues the response."""
        self.steered = True
        self._stop()

    def _stop(self) -> None:
        if self._scope is not None:
            self._scope.reschedule(0.0)

    async def unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work`` up to its end, or until the response is cancelled or steered."""
        if self.cancelled or self.steered:
            work.close()
            return
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                await work
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._scope = None


class RunningResponses:
    """All responses under way, by id and by the conversation that they extend."""

    def __init__(self) -> None:
        self._responses: dict[str, RunningResponse] = {}
        # Who waits for a conversation that is being extended or changed.
        self._busy: dict[tuple[str, str], deque[asyncio.Future[None]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any response or change of a conversation is under way."""
        return bool(self._responses or self._busy)

    @contextmanager
    def extending(self, owner: str, conversation: str) -> Iterator[None]:
        """Keep others from extending or changing a conversation. Raises ConversationBusyError."""
        if (owner, conversation) in self._busy:
            raise ConversationBusyError
        self._busy[owner, conversation] = deque()
        with self._extended(owner, conversation):
            yield

    async def extending_next(self, owner: str, conversation: str) -> AbstractContextManager[None]:
        """Wait until nobody extends or changes a conversation. Return the block that keeps others from it.

        It must be entered at once. Those who wait come one after the other, before anyone who does not wait.
        """
        waiting = self._busy.get((owner, conversation))
        if waiting is None:
            self._busy[owner, conversation] = deque()
        else:
            freed = asyncio.get_running_loop().create_future()
            waiting.append(freed)
            try:
                await freed
            except asyncio.CancelledError:
                if not freed.cancelled():
                    self._free(owner, conversation)
                raise
        return self._extended(owner, conversation)

    @contextmanager
    def _extended(self, owner: str, conversation: str) -> Iterator[None]:
        try:
            yield
        finally:
            self._free(owner, conversation)

    def _free(self, owner: str, conversation: str) -> None:
        """Let the next one have a conversation."""
        waiting = self._busy[owner, conversation]
        while waiting:
            freed = waiting.popleft()
            if not freed.done():
                freed.set_result(None)
                return
        del self._busy[owner, conversation]

    @contextmanager
    def listing(self, response: RunningResponse) -> Iterator[None]:
        """List the response until the end of the block."""
        self._responses[response.id] = response
        try:
            yield
        finally:
            del self._responses[response.id]
            response.ended.set()

    def find(self, owner: str, response_id: str) -> RunningResponse | None:
        """Return the owner's response of this id that is under way; None if there is none."""
        found = self._responses.get(response_id)
        return found if found is not None and found.started and found.owner == owner else None

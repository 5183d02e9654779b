"""Those who watch the schedulers, and the messages that they have not read yet."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection

import msgspec

from caravan_router.engine.batcher import Batcher
from caravan_studio.timeline.messages import Dropped, Gone, Hello, Message
from caravan_studio.timeline.model_timeline import FRAME_S, STATE_S, ModelTimeline

_log = logging.getLogger(__name__)

# Most viewers at a time, and most messages that wait for one of them.
_MOST_VIEWERS = 16
_MOST_MESSAGES = 64

_encode = msgspec.json.Encoder().encode


class _Viewer:
    """What one viewer has not read yet."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._dropped = 0
        self._filled = asyncio.Event()

    def put(self, message: bytes) -> None:
        """Add a message, unless the viewer is too far behind."""
        if len(self._messages) >= _MOST_MESSAGES:
            self._dropped += 1
            return
        if self._dropped:
            self._messages.append(_encode(Dropped(count=self._dropped)))
            self._dropped = 0
        self._messages.append(message)
        self._filled.set()

    async def next(self) -> bytes:
        """Wait for a message and take it out."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()


class Viewers:
    """Follows the schedulers of ``batchers``, which come and go, as long as somebody watches; costs nothing else.

    `tell_of_engines` adds those who follow each of them from its beginning.
    """

    def __init__(self, batchers: Collection[Batcher]) -> None:
        self._told_of_engines: list[Callable[[Batcher], None]] = []
        self._batchers = batchers
        self._viewers: set[_Viewer] = set()
        self._timelines: dict[Batcher, ModelTimeline] = {}
        # Those whose timeline has raised an exception, until nobody watches.
        self._failed: set[Batcher] = set()
        self._telling: asyncio.Task[None] | None = None

    def tell_of_engines(self, told: Callable[[Batcher], None]) -> None:
        """Call ``told`` with each engine: now, and of a new one before a shard of it joins."""
        self._told_of_engines.append(told)
        for batcher in self._batchers:
            told(batcher)

    def note_engine(self, batcher: Batcher) -> None:
        """Tell of a new engine, which is not among the others yet."""
        for told in self._told_of_engines:
            told(batcher)

    def messages(self) -> AsyncGenerator[bytes, None] | None:
        """Return messages as JSON, from now until the caller closes the generator. None if too many watch already."""
        return None if len(self._viewers) >= _MOST_VIEWERS else self._messages()

    async def _messages(self) -> AsyncGenerator[bytes, None]:
        viewer = _Viewer()
        viewer.put(_encode(Hello(at=time.monotonic(), unix=time.time(), frame_s=FRAME_S, state_s=STATE_S)))
        self._viewers.add(viewer)
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell())
        try:
            while True:
                yield await viewer.next()
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                self._end()

    def _end(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        for batcher in list(self._timelines):
            batcher.followers.remove(self._timelines.pop(batcher))
        self._failed.clear()

    async def _tell(self) -> None:
        while True:
            self._tell_once(time.monotonic())
            await asyncio.sleep(FRAME_S)

    def _tell_once(self, now: float) -> None:
        for batcher in self._batchers:
            if batcher not in self._timelines and batcher not in self._failed:
                timeline = self._timelines[batcher] = ModelTimeline(batcher.model.name, batcher.scheduler, now)
                batcher.followers.append(timeline)
        for batcher in [one for one in self._timelines if one not in self._batchers]:
            batcher.followers.remove(self._timelines.pop(batcher))
            self._put(Gone(model=batcher.model.name, at=round(now, 6)))
        for batcher, timeline in list(self._timelines.items()):
            try:
                for message in timeline.messages(now):
                    self._put(message)
            except Exception:  # noqa: BLE001  whatever a bug raises
                _log.exception("a timeline failed and is no longer sent", extra={"model": batcher.model.name})
                batcher.followers.remove(self._timelines.pop(batcher))
                self._failed.add(batcher)
                self._put(Gone(model=batcher.model.name, at=round(now, 6)))

    def _put(self, message: Message) -> None:
        encoded = _encode(message)
        for viewer in self._viewers:
            viewer.put(encoded)

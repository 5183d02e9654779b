"""A thread with an event loop, on which a model or a client runs while the program does something else."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from caravan.errors import ClosedError

T = TypeVar("T")

# The signal of Ctrl-C may reach another thread of the process. The handler runs when this one looks up.
_POLL_S = 0.5


class BackgroundLoop:
    """Runs coroutines for callers on any other thread. A call that is interrupted cancels its coroutine."""

    def __init__(self, owner: str = "model") -> None:
        """``owner``: what errors say that is closed."""
        self._owner = owner
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="caravan", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = False
        # Calls that have not ended.
        self._calls: set[asyncio.Task[Any]] = set()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def start(
        self, work: Coroutine[Any, Any, T], tasks: "list[asyncio.Task[T]]", on_end: "Callable[[asyncio.Task[T]], None]"
    ) -> None:
        """Start ``work`` and put its task into ``tasks``; ``on_end`` is called on the loop's thread when it has ended.

        Raises ClosedError.
        """

        def begin() -> None:
            task = self._loop.create_task(work)
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(on_end)
            tasks.append(task)

        with self._lock:
            if self._closed:
                work.close()
                raise ClosedError(f"the {self._owner} is closed")
            self._loop.call_soon_threadsafe(begin)

    def cancel(self, tasks: "Sequence[asyncio.Task[Any]]", on_nothing: Callable[[], None]) -> bool:
        """Cancel what `start` put into ``tasks``, or call ``on_nothing``; False if the thread ends anyway."""

        def stop() -> None:
            for task in tasks:
                task.cancel()
            if not tasks:
                on_nothing()

        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(stop)
            return not self._closed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result. An interrupt, such as Ctrl-C, cancels it first."""
        ended = threading.Event()
        tasks: list[asyncio.Task[T]] = []
        try:
            self.start(work, tasks, lambda _task: ended.set())
            while not ended.wait(_POLL_S):
                pass
        except ClosedError:
            raise
        except BaseException:
            # The interrupt may have come before the task was made.
            if self.cancel(tasks, ended.set):
                ended.wait()
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise ClosedError(f"the {self._owner} was closed before the call had ended") from None

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous generator; closing the iterator closes it."""
        end = object()

        async def following() -> Any:
            return await anext(items, end)

        try:
            while (item := self.run(following())) is not end:
                yield item
        finally:
            with suppress(ClosedError):
                self.run(_end(items))

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel the calls, run ``finish``, and end the thread. Closing it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._start_end, finish)
        # The garbage collector may call this on any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start_end(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ending = self._loop.create_task(self._finish(finish))

    async def _finish(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            calls = list(self._calls)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await finish()
        finally:
            self._loop.stop()


async def _end(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()

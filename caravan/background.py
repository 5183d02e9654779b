"""A thread with an event loop, on which a model or a client runs while the program does something else."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from caravan.errors import ClosedError, ForkedError
from caravan.processes import OpeningProcess

T = TypeVar("T")

# The signal of Ctrl-C may reach another thread of the process. The handler runs when this one looks up.
_POLL_S = 0.5
# Stands for the item after the last one.
END = object()


class Call(Generic[T]):
    """Work that was handed to the loop's thread. ``task`` is None until that thread has taken it up."""

    def __init__(self) -> None:
        self.task: asyncio.Task[T] | None = None


class BackgroundLoop:
    """Runs coroutines for callers on any other thread. A call that is interrupted cancels its coroutine."""

    def __init__(self, owner: str = "model") -> None:
        """``owner``: what errors say that is closed."""
        self._owner = owner
        self._process = OpeningProcess()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="caravan", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._closed = False
        # Why the owner can do nothing more, although it is not closed.
        self._failure: BaseException | None = None
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

    def start(self, call: Call[T], work: Coroutine[Any, Any, T], on_end: Callable[[], None]) -> None:
        """Start ``work`` as the task of ``call``; ``on_end`` is called on the loop's thread when it has ended.

        The caller makes ``call``, since an interrupt may keep this method from returning. Raises ClosedError.
        """

        def begin() -> None:
            task = call.task = self._loop.create_task(work)
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            task.add_done_callback(lambda _task: on_end())

        try:
            # Before the lock, which another thread of the parent may have held.
            self._process.check(self._owner)
        except ForkedError:
            work.close()
            raise
        with self._lock:
            if self._closed or self._failure is not None:
                work.close()
                raise self._ended("is closed")
            self._loop.call_soon_threadsafe(begin)

    def fail(self, failure: BaseException) -> None:
        """End all calls, and refuse later ones, with a ClosedError of which ``failure`` is the cause.

        Call it on the loop's thread. What the owner holds stays until `close`.
        """
        with self._lock:
            self._failure = failure
        for call in self._calls:
            call.cancel()

    def result(self, call: Call[T]) -> T:
        """Return the result of a call that has ended. Raises ClosedError if the owner's end has cancelled it."""
        assert call.task is not None, "a call that has ended was taken up"
        try:
            return call.task.result()
        except asyncio.CancelledError:
            error = self._ended("was closed before the call had ended")
            raise error from error.__cause__

    def _ended(self, otherwise: str) -> ClosedError:
        if self._failure is None:
            return ClosedError(f"the {self._owner} {otherwise}")
        error = ClosedError(f"the {self._owner} has failed: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    def cancel(self, call: Call[Any], on_nothing: Callable[[], None]) -> bool:
        """Cancel ``call``, or call ``on_nothing`` if it was never started; False if the thread ends anyway."""

        def stop() -> None:
            if call.task is None:
                on_nothing()
            else:
                call.task.cancel()

        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(stop)
            return not self._closed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end and return its result. An interrupt, such as Ctrl-C, cancels it first."""
        ended = threading.Event()
        call = Call[T]()
        try:
            self.start(call, work, ended.set)
            while not ended.wait(_POLL_S):
                pass
        except ClosedError:
            raise
        except BaseException:
            # The interrupt may have come before the task was made.
            if self.cancel(call, ended.set):
                ended.wait()
            raise
        return self.result(call)

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the items of an asynchronous generator; closing the iterator closes it."""
        try:
            while (item := self.run(following(items))) is not END:
                yield item
        finally:
            with suppress(ClosedError):
                self.run(end(items))

    def close(self, finish: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel the calls, run ``finish``, and end the thread. Again, or in a child by fork, it does nothing."""
        if not self._process.is_this:
            return
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


async def following(items: AsyncGenerator[Any, None]) -> Any:
    """Return the next item, or END after the last one."""
    return await anext(items, END)


async def end(items: AsyncGenerator[Any, None]) -> None:
    """Close ``items``, also before the last one."""
    await items.aclose()

"""The thread on which a client with calls that block runs the asynchronous one."""

import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from caravan.background import BackgroundLoop

_T = TypeVar("_T")


class ClientThread:
    """Runs the calls of a client, and of its conversations, until it is closed or the last of them is gone."""

    def __init__(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """``close`` runs last."""
        self._loop = loop = BackgroundLoop("client")
        # Also at the end of the program.
        self._close = weakref.finalize(self, loop.close, close)

    def close(self) -> None:
        """End the calls that run, and the thread. Closing it again does nothing."""
        self._close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` to its end and return its result. An interrupt cancels it first. Raises ClosedError."""
        return self._loop.run(work)

    def iterate(self, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
        """Yield the items; closing the iterator closes ``items``. Raises ClosedError."""
        yield from self._loop.iterate(items)

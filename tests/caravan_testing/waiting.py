"""Waiting for a named event that another task, thread or process brings about.

All waits have one deadline, for a host on which everything takes ten times as long: a wait that succeeds costs nothing
more. Whoever waits names the event, and the failure says what was last seen instead.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, overload

T = TypeVar("T")

DEADLINE_S = 300.0
# In an event loop a look costs little.
_PAUSE_S = 0.002
# What a thread looks at, or what has to be awaited, is mostly another process.
_LONG_PAUSE_S = 0.02


@overload
async def eventually(
    look: Callable[[], Awaitable[T]],
    what: str = ...,
    accept: Callable[[T], object] = ...,
    *,
    unless: Callable[[], object] | None = ...,
    ignoring: tuple[type[Exception], ...] = ...,
) -> T: ...


@overload
async def eventually(
    look: Callable[[], T],
    what: str = ...,
    accept: Callable[[T], object] = ...,
    *,
    unless: Callable[[], object] | None = ...,
    ignoring: tuple[type[Exception], ...] = ...,
) -> T: ...


async def eventually(
    look: Callable[[], Any],
    what: str = "the condition",
    accept: Callable[[Any], object] = bool,
    *,
    unless: Callable[[], object] | None = None,
    ignoring: tuple[type[Exception], ...] = (),
) -> Any:
    """Look until ``accept`` takes what ``look`` returns, and return that.

    Fails at the deadline, and as soon as ``unless`` says why it will never come, such as the log of a program that has
    ended. ``ignoring``: what ``look`` may raise before.
    """
    wait = _Wait(what, unless)
    while True:
        pause_s = _PAUSE_S
        try:
            found = look()
            if isinstance(found, Awaitable):
                pause_s = _LONG_PAUSE_S
                async with asyncio.timeout(wait.left_s):
                    found = await found
            if accept(found):
                return found
            wait.seen = repr(found)
        except ignoring as error:
            pause_s = _LONG_PAUSE_S
            wait.seen = repr(error)
        except TimeoutError:
            if wait.left_s > 0:
                raise
        wait.check()
        await asyncio.sleep(pause_s)


def wait_until(
    look: Callable[[], T],
    what: str,
    accept: Callable[[T], object] = bool,
    *,
    unless: Callable[[], object] | None = None,
    ignoring: tuple[type[Exception], ...] = (),
) -> T:
    """Do what `eventually` does, in a thread without an event loop."""
    wait = _Wait(what, unless)
    while True:
        try:
            found = look()
            if accept(found):
                return found
            wait.seen = repr(found)
        except ignoring as error:
            wait.seen = repr(error)
        wait.check()
        time.sleep(_LONG_PAUSE_S)


async def deliver(pid: int, number: signal.Signals) -> None:
    """Send a signal that stops or ends a child of this process, and wait until it has.

    The kernel delivers a signal after ``kill`` has returned: until then the child may still answer.
    """
    os.kill(pid, number)
    how = os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG
    # The event loop may have collected the child first.
    with suppress(ChildProcessError):
        await eventually(lambda: os.waitid(os.P_PID, pid, how), f"{number.name} reaches process {pid}")


@asynccontextmanager
async def in_time(what: str) -> AsyncIterator[None]:
    """Fail unless the block, which waits for events itself, ends before the deadline."""
    limit = asyncio.timeout(DEADLINE_S)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what}") from None


class _Wait:
    """What is waited for, and what was seen last."""

    def __init__(self, what: str, unless: Callable[[], object] | None) -> None:
        self.seen = "nothing"
        self._what = what
        self._unless = unless
        self._until = time.monotonic() + DEADLINE_S

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def check(self) -> None:
        """Raise AssertionError if waiting is of no use any more."""
        reason = self._unless() if self._unless is not None else None
        assert not reason, f"this cannot come any more: {self._what}; last seen: {self.seen}; {reason}"
        assert self.left_s > 0, f"not within {DEADLINE_S:g} s: {self._what}; last seen: {self.seen}"

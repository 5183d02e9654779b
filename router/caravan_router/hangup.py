"""SIGHUP, which service managers send to have files read again, and the kernel when a terminal is closed."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_hangup(reload: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    """Call ``reload`` on each SIGHUP, but ``stop`` once the terminal of the program is closed.

    Under ``nohup``, where SIGHUP was ignored before, that does not end the program either.
    """
    ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: stop() if ends_with_terminal and not _has_terminal() else reload())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True

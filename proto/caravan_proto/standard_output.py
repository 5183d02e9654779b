"""What a command does when the reader of its standard output has left, as `head` does in `caravan --help | head -1`."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# What a shell reports of a program that SIGPIPE ended, which is how others end. A server must not be ended by this
# signal itself: the kernel sends it for sockets too.
_STATUS = 128 + signal.SIGPIPE


@contextmanager
def ending_with_its_reader() -> Iterator[None]:
    """End the program without a message if standard output cannot be written any more. Raises SystemExit."""
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        # A socket may be the one that broke.
        if not _reader_left():
            raise
        _discard_output()
        raise SystemExit(_STATUS) from None


def write_at_once(text: str) -> None:
    """Write ``text`` to standard output, or drop it and what follows if nobody reads it."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _reader_left() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard_output() -> None:
    """Let nobody read standard output. What is left in its buffer would fail again when the interpreter ends."""
    discard = os.open(os.devnull, os.O_WRONLY)
    os.dup2(discard, sys.stdout.fileno())
    os.close(discard)

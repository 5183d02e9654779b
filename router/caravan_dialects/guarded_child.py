"""What runs in the processes of `guarded_process`: it answers one request after another, within limits.

A message is its length in four bytes and then its content. A client's first chat waits for the start of such a process,
so this imports little: asyncio alone would take a third of the start.
"""

import resource
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

LENGTH_BYTES = 4


def framed(message: bytes) -> bytes:
    """Return the bytes of one message, length included."""
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def limit_process(memory_bytes: int) -> None:
    """Limit the memory of this process, before it reads its first request."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer requests from standard input until it ends."""
    time_limit_s = float(sys.argv[1])
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    # The signal has its default action, the kernel kills the process: nothing that runs in it can prevent that.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, time_limit_s)
        reply = framed(answer(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply)
        replies.flush()


def _read(requests: BinaryIO) -> bytes | None:
    head = requests.read(LENGTH_BYTES)
    return requests.read(int.from_bytes(head, "big")) if len(head) == LENGTH_BYTES else None

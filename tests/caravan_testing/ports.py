"""Ports for programs that have to be told theirs before they run."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Return free ports that nothing else gets meanwhile.

    They stay bound here without listening, so that the kernel gives them to no other socket. Programs that set
    SO_REUSEADDR, as servers do, can bind them nevertheless, again and again.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for kept in sockets:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((host, 0))
        yield [kept.getsockname()[1] for kept in sockets]

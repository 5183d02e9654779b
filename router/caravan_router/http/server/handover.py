"""Hands the listening port from a router that runs to one that starts, so that no connection is refused in between.

Both sides meet at a Unix socket. The router that runs sends a descriptor of its listening socket; the other one listens
on it, which takes connections from the same queue, and answers with a byte. Then the first router stops.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_OFFER, _TAKEN = b"p", b"t"


class Handover:
    """The Unix socket at ``path``, where the router that listens can be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: socket.socket | None = None

    async def receive(self) -> socket.socket | None:
        """Return the listening socket of the router that runs; None if none runs. `confirm` must follow."""
        return await asyncio.to_thread(self._receive)

    def _receive(self) -> socket.socket | None:
        before = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before.settimeout(_TIMEOUT_S)
        try:
            before.connect(str(self._path))
            offer, descriptors, _, _ = socket.recv_fds(before, len(_OFFER), 1)
        except OSError:
            before.close()
            return None
        if offer != _OFFER or not descriptors:
            before.close()
            return None
        self._before = before
        return socket.socket(fileno=descriptors[0])

    def confirm(self) -> None:
        """Let the router before this one stop: this one listens."""
        if self._before is not None:
            with self._before, contextlib.suppress(OSError):
                self._before.sendall(_TAKEN)
            self._before = None

    @contextlib.asynccontextmanager
    async def offering(self, descriptor: int, on_taken: Callable[[], None]) -> AsyncIterator[None]:
        """Offer the listening socket ``descriptor``. ``on_taken``: called when another router listens on it."""
        offering = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A name of its own first: the file of a router that runs is replaced at once, and never missing.
        own = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        offering.bind(str(own))
        own.chmod(0o600)
        offering.listen()
        offering.setblocking(False)
        inode = own.stat().st_ino
        own.replace(self._path)
        serving = asyncio.create_task(self._offer(offering, descriptor, on_taken))
        try:
            yield
        finally:
            serving.cancel()
            offering.close()
            with contextlib.suppress(OSError):
                if self._path.stat().st_ino == inode:
                    self._path.unlink()

    async def _offer(self, offering: socket.socket, descriptor: int, on_taken: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(offering)
            with connection:
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        socket.send_fds(connection, [_OFFER], [descriptor])
                        answer = await loop.sock_recv(connection, len(_TAKEN))
                except OSError as error:
                    _log.warning("a handover failed", extra={"reason": str(error)})
                    continue
            if answer == _TAKEN:
                _log.info("another router listens now")
                on_taken()
                return

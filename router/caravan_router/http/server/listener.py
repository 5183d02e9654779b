"""The listening port: accepts a bounded number of connections, closes stuck ones, and is handed to another router.

Both sides of a handover meet at a Unix socket. The router that runs sends a descriptor of its listening socket; the
other one listens on it, which takes connections from the same queue, and answers with a byte. Then the first router
stops.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from aiohttp import web

from caravan_dialects.api.error_table import Dialect, headers_of, kind_of
from caravan_dialects.api.errors import TooManyConnectionsError
from caravan_dialects.api.limits import Limits
from caravan_proto.files import CHECK_S, FileWatch
from caravan_proto.tls import TlsFileError, TlsFiles
from caravan_router.http.server.connection import Connection
from caravan_router.http.server.dialect import DIALECTS, Dialects
from caravan_router.http.server.root_path import ROOT_PATH
from caravan_router.http.server.state import ENDING

_log = logging.getLogger(__name__)
_MOST_BETWEEN_CHECKS_S = 1.0
# How long requests are taken on open connections when no more connections are.
_LAST_REQUESTS_S = 2.0
_POLL_S = 0.05
# How long the client of a refused connection has for reading why.
_REFUSAL_S = 2.0
_TIMEOUT_S = 5.0


class Tls:
    """Owns the SSL context. Changed files are for later handshakes; authorities are added to it, and none removed."""

    def __init__(self, files: TlsFiles, check_s: float = CHECK_S) -> None:
        """Read the files, which blocks. Raises TlsFileError."""
        self._files = files
        self.file = FileWatch(files.paths, check_s)
        self.context = _context(files)

    async def run(self) -> None:
        """Read changed files again, until cancelled. Broken ones are logged and change nothing."""
        async for _ in self.file.changes():
            try:
                # A key that does not fit would leave the context half changed, so another context tries the files.
                await asyncio.to_thread(_context, self._files)
                # Not in a thread: between the certificate and its key, a handshake on this loop would fail.
                self._files.load_into(self.context)
            except TlsFileError as error:
                _log.error("certificate not reloaded, keeping the old one: %s", error)
            else:
                _log.info("certificate reloaded")


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    if files.ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    files.load_into(context)
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """How to listen. ``port`` 0: any free one. ``drain_s``: seconds that running requests may take at the end.

    ``inherited``: a socket that listens already, instead of host and port.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    drain_s: float = 1.0
    inherited: socket.socket | None = None


class Port:
    """An open port. ``url``: the base URL, without a trailing slash. ``descriptor``: that of its socket."""

    def __init__(self, url: str, server: asyncio.Server, app: web.Application, connections: web.Server) -> None:
        self.url = url
        self.descriptor = server.sockets[0].fileno()
        self._server = server
        self._app = app
        self._connections = connections

    def abort(self) -> None:
        """Close every connection at once, which cancels the handlers of their requests."""
        for connection in self._connections.connections:
            if connection.transport is not None:
                connection.transport.abort()

    async def stop_accepting(self) -> None:
        """Accept no connections, and end the open ones with their next replies, which come for a short time.

        A client that sends a request on a connection just when the server closes it would see an error.
        """
        self._server.close()
        self._app[ENDING].set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_REQUESTS_S):
                while self._connections.connections:  # noqa: ASYNC110  once, at the end
                    await asyncio.sleep(_POLL_S)

    async def finish(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until all connections have ended. Call `stop_accepting` before.

        A stream that began before then could not announce that it is the last reply of its connection, so that its
        client may send one more request on it. A connection is closed when none has come for a short time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while connections := list(self._connections.connections):
                    for connection in connections:
                        assert isinstance(connection, Connection)
                        if connection.idle_s >= _LAST_REQUESTS_S:
                            connection.close_idle()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self.abort()


@asynccontextmanager
async def listening(app: web.Application, limits: Limits, listen: Listen) -> AsyncIterator[Port]:
    """Serve ``app`` on a port until the block ends. Raises OSError if the port cannot be bound."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=listen.drain_s)
    await runner.setup()
    try:
        server = runner.server
        assert server is not None
        acceptor = _Acceptor(server, limits, app[DIALECTS], app[ROOT_PATH])
        loop = asyncio.get_running_loop()
        handshake_s = None if listen.tls is None else limits.header_timeout_s
        if listen.inherited is None:
            port = await loop.create_server(
                acceptor.accept, listen.host, listen.port, ssl=listen.tls, ssl_handshake_timeout=handshake_s
            )
        else:
            port = await loop.create_server(
                acceptor.accept, sock=listen.inherited, ssl=listen.tls, ssl_handshake_timeout=handshake_s
            )
        checking = asyncio.create_task(acceptor.check())
        try:
            host, number = port.sockets[0].getsockname()[:2]
            scheme = "http" if listen.tls is None else "https"
            yield Port(f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}", port, app, server)
        finally:
            port.close()
            checking.cancel()
    finally:
        await runner.cleanup()


class _Acceptor:
    def __init__(self, server: web.Server, limits: Limits, dialects: Dialects, root_path: str) -> None:
        self._server = server
        self._root_path = root_path
        self._limits = limits
        self._dialects = dialects

    def accept(self) -> asyncio.Protocol:
        """Return a connection, or a protocol that refuses it because there are too many."""
        if len(self._server.connections) < self._limits.max_connections:
            return Connection(self._server, self._dialects, self._root_path)
        return _Refused(TooManyConnectionsError(self._limits.max_connections), self._dialects.default)

    async def check(self) -> None:
        """Check every connection, about once a second, until cancelled."""
        limits = self._limits
        pause_s = min(_MOST_BETWEEN_CHECKS_S, limits.header_timeout_s / 4, limits.slow_client_timeout_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            for connection in self._server.connections:
                assert isinstance(connection, Connection)
                connection.check(limits, now)


class _Refused(asyncio.Protocol):
    """Sends a 503 and closes the connection, without looking at the request."""

    def __init__(self, error: TooManyConnectionsError, dialect: Dialect) -> None:
        self._error = error
        self._dialect = dialect

    def connection_made(self, made: asyncio.BaseTransport) -> None:
        # The transports of uvloop, on which the router runs, have the methods of this class without inheriting from it.
        transport = cast("asyncio.WriteTransport", made)
        body = self._dialect.body(self._error, "")
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **headers_of(self._error),
            "Connection": "close",
        }
        status = self._dialect.status(kind_of(self._error))
        lines = [f"HTTP/1.1 {status} Service Unavailable", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join(lines) + "\r\n\r\n"
        transport.write(head.encode() + body)
        if not transport.can_write_eof():
            transport.close()
            return
        # Closing a connection whose bytes were not read resets it, and the client might lose the reply. So the client
        # closes it once it has read that, or it is closed later.
        transport.write_eof()
        asyncio.get_running_loop().call_later(_REFUSAL_S, transport.close)


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

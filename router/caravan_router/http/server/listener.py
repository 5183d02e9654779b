"""The listening port: accepts a bounded number of connections and closes stuck ones."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from aiohttp import web

from caravan_dialects.api.errors import Dialect, TooManyConnectionsError, headers_of, kind_of
from caravan_dialects.api.limits import Limits
from caravan_router.http.server.connection import Connection
from caravan_router.http.server.dialect import DIALECTS, Dialects
from caravan_router.http.server.state import ENDING

_MOST_BETWEEN_CHECKS_S = 1.0
# How long requests are taken on open connections when no more connections are.
_LAST_REQUESTS_S = 2.0
_POLL_S = 0.05
# How long the client of a refused connection has for reading why.
_REFUSAL_S = 2.0


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
        acceptor = _Acceptor(server, limits, app[DIALECTS])
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
    def __init__(self, server: web.Server, limits: Limits, dialects: Dialects) -> None:
        self._server = server
        self._limits = limits
        self._dialects = dialects

    def accept(self) -> asyncio.Protocol:
        """Return a connection, or a protocol that refuses it because there are too many."""
        if len(self._server.connections) < self._limits.max_connections:
            return Connection(self._server, self._dialects)
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

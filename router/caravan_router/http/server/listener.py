"""The listening port: accepts a bounded number of connections and closes stuck ones."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from caravan_router.http.limits import Limits
from caravan_router.http.server.connection import Connection
from caravan_router.http.server.dialect import DIALECTS, Dialect
from caravan_router.http.server.errors import TooManyConnectionsError, headers_of, kind_of

_MOST_BETWEEN_CHECKS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where and how to listen. ``port`` 0: any free one. ``drain_s``: how long running requests may take at the end."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    drain_s: float = 1.0


@asynccontextmanager
async def listening(app: web.Application, limits: Limits, listen: Listen) -> AsyncIterator[str]:
    """Yield the base URL, without a trailing slash. Raises OSError if the port cannot be bound."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=listen.drain_s)
    await runner.setup()
    try:
        server = runner.server
        assert server is not None
        acceptor = _Acceptor(server, limits, app[DIALECTS].default)
        loop = asyncio.get_running_loop()
        handshake_s = None if listen.tls is None else limits.header_timeout_s
        port = await loop.create_server(
            acceptor.accept, listen.host, listen.port, ssl=listen.tls, ssl_handshake_timeout=handshake_s
        )
        checking = asyncio.create_task(acceptor.check())
        try:
            host, number = port.sockets[0].getsockname()[:2]
            scheme = "http" if listen.tls is None else "https"
            yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}"
        finally:
            port.close()
            checking.cancel()
    finally:
        await runner.cleanup()


class _Acceptor:
    def __init__(self, server: web.Server, limits: Limits, dialect: Dialect) -> None:
        self._server = server
        self._limits = limits
        self._dialect = dialect

    def accept(self) -> asyncio.Protocol:
        """Return a connection, or a protocol that refuses it because there are too many."""
        if len(self._server.connections) < self._limits.max_connections:
            return Connection(self._server, self._dialect)
        return _Refused(TooManyConnectionsError(self._limits.max_connections), self._dialect)

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
    """Sends a 503 without reading the request, and closes the connection."""

    def __init__(self, error: TooManyConnectionsError, dialect: Dialect) -> None:
        self._error = error
        self._dialect = dialect

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        body = self._dialect.body(self._error)
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
        transport.close()

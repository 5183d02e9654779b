"""The port: takes connections up to a number, and ends those that are of no use."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from caravan_router.http.limits import Limits
from caravan_router.http.server.connection import Connection
from caravan_router.http.server.errors import TooManyConnectionsError, rendering_of, tgi_body

_MOST_BETWEEN_CHECKS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where, and how. ``port`` 0: a free one. ``drain_s``: at the end, for requests under way."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None
    drain_s: float = 1.0


@asynccontextmanager
async def listening(app: web.Application, limits: Limits, listen: Listen) -> AsyncIterator[str]:
    """Yields the base URL, without a slash at its end. Raises OSError if the port cannot be had."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=listen.drain_s)
    await runner.setup()
    try:
        server = runner.server
        assert server is not None
        door = _Door(server, limits)
        loop = asyncio.get_running_loop()
        handshake_s = None if listen.tls is None else limits.header_timeout_s
        port = await loop.create_server(
            door.open, listen.host, listen.port, ssl=listen.tls, ssl_handshake_timeout=handshake_s
        )
        checking = asyncio.create_task(door.check())
        try:
            host, number = port.sockets[0].getsockname()[:2]
            scheme = "http" if listen.tls is None else "https"
            yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}"
        finally:
            port.close()
            checking.cancel()
    finally:
        await runner.cleanup()


class _Door:
    def __init__(self, server: web.Server, limits: Limits) -> None:
        self._server = server
        self._limits = limits

    def open(self) -> asyncio.Protocol:
        """A connection, or what tells its client that there are too many."""
        if len(self._server.connections) < self._limits.max_connections:
            return Connection(self._server)
        return _TurnedAway(self._limits.max_connections)

    async def check(self) -> None:
        """Until cancelled."""
        limits = self._limits
        pause_s = min(_MOST_BETWEEN_CHECKS_S, limits.header_timeout_s / 4, limits.slow_client_timeout_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            for connection in self._server.connections:
                assert isinstance(connection, Connection)
                connection.check(limits, now)


class _TurnedAway(asyncio.Protocol):
    """Says so before it has heard anything, and hangs up."""

    def __init__(self, limit: int) -> None:
        self._error = TooManyConnectionsError(limit)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        rendering, body = rendering_of(self._error), tgi_body(self._error)
        head = (
            f"HTTP/1.1 {rendering.status} Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: {rendering.retry_after_s}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()

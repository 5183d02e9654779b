"""One connection: aiohttp's, which also ends when it is of no use and answers what is no HTTP in JSON."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from caravan_router.http.limits import Limits
from caravan_router.http.server.errors import MalformedRequestError, error_response
from caravan_router.http.server.middleware import Handler

_log = logging.getLogger(__name__)

# Idle connections: longer than clients' pools keep them, far below aiohttp's hour.
KEEPALIVE_S = 75.0
# For what is left of a refused request's body: a client that still sends may not see its answer otherwise.
LINGERING_S = 2.0


class Connection(web.RequestHandler):
    """Idle ones end after `KEEPALIVE_S`, by aiohttp; `check` ends what that does not."""

    __slots__ = ("_asked", "_opened_at", "_serving", "_unsent_bytes", "_unsent_since")

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGERING_S,
            access_log=None,  # type: ignore[arg-type] # as AppRunner passes it: the middleware logs
        )
        self._opened_at = time.monotonic()
        # A whole request head has come.
        self._asked = False
        # A handler is at work, which has deadlines of its own.
        self._serving = False
        self._unsent_bytes = 0
        self._unsent_since = self._opened_at

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While a request is handled."""
        self._asked = self._serving = True
        try:
            yield
        finally:
            self._serving = False

    def check(self, limits: Limits, now: float) -> None:
        """To be called now and then: cuts a client that does not say what it wants, or does not take its reply."""
        if self._serving or self.transport is None:
            self._unsent_bytes = 0
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        elif unsent and now - self._unsent_since >= limits.slow_client_timeout_s:
            self.transport.abort()
        if not self._asked and now - self._opened_at >= limits.header_timeout_s:
            self.force_close()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that is not what its headers say is its sender's mistake too, and was answered."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            _log.debug("%s", kw["exc_info"])
        else:
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What could not be read as HTTP is its sender's mistake: answered, and no matter for the log."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        _log.debug("not HTTP, from %s: %s", request.remote, exc)
        return error_response(MalformedRequestError(exc.message), request.path)


@web.middleware
async def mark_serving(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost: tells the connection that it is of use."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    with connection.serving():
        return await handler(request)

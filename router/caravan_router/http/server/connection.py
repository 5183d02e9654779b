"""One client connection: aiohttp's, closed when idle or stuck, with JSON answers to bytes that are not HTTP."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError

from caravan_dialects.api.errors import MalformedRequestError, RequestError, UnsupportedCodingError
from caravan_dialects.api.limits import Limits
from caravan_router.http.server.dialect import Dialects, error_response
from caravan_router.http.server.root_path import without_root
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import ARRIVED

_log = logging.getLogger(__name__)

# Idle connections are kept longer than clients' pools keep them, and far shorter than aiohttp's hour.
KEEPALIVE_S = 75.0
# After refusing a request, the rest of its body is read for this long, so that a client that is sending gets the reply.
LINGERING_S = 2.0
_MOST_LINE_BYTES = 4096


class Connection(web.RequestHandler):
    """A connection that aiohttp closes when idle for `KEEPALIVE_S`, and `check` when stuck.

    The end of what the client sends is taken for its leaving: a client that closes its socket sends nothing else.
    """

    __slots__ = (
        "_dialects",
        "_idle_since",
        "_line",
        "_on_data",
        "_opened_at",
        "_received_head",
        "_serving",
        "_unsent_bytes",
        "_unsent_since",
    )

    def __init__(self, server: web.Server, dialects: Dialects, root_path: str = "") -> None:
        """``dialects``: for answers to bytes that are not HTTP, or not as aiohttp can read it.

        ``root_path``: see `without_root`.
        """
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGERING_S,
            access_log=None,  # type: ignore[arg-type] # as AppRunner passes it: the middleware logs
        )
        if root_path and self._request_factory is not None:
            self._request_factory = without_root(self._request_factory, root_path)
        self._dialects = dialects
        # The first line of what came last.
        self._line = b""
        self._opened_at = self._idle_since = time.monotonic()
        self._received_head = False
        # True while a handler runs, which has its own deadlines.
        self._serving = False
        self._unsent_bytes = 0
        self._unsent_since = self._opened_at
        self._on_data: Callable[[int], None] | None = None

    def count_data(self, count: Callable[[int], None]) -> None:
        """Call ``count`` with the number of bytes of whatever comes from now on, before it is read."""
        self._on_data = count

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Mark the connection as in use while a request is handled."""
        self._received_head = self._serving = True
        try:
            yield
        finally:
            self._serving = False
            self._idle_since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request was answered; 0.0 while one is handled."""
        return 0.0 if self._serving else time.monotonic() - self._idle_since

    def close_idle(self) -> None:
        """Close the connection, on which no request is handled, once its client has what was sent.

        aiohttp's `close` ends the wait for the next request and leaves the transport open until the client closes it.
        """
        self.close()
        if self.transport is not None:
            self.transport.close()

    def check(self, limits: Limits, now: float) -> None:
        """Close the connection if its client sends no request head, or reads no reply, in time. Call once a second."""
        if self._serving or self.transport is None:
            self._unsent_bytes = 0
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        elif unsent and now - self._unsent_since >= limits.slow_client_timeout_s:
            self.transport.abort()
        if not self._received_head and now - self._opened_at >= limits.header_timeout_s:
            self.force_close()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a body that contradicts its headers at debug level only: the client erred and was answered."""
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
        """Answer bytes that cannot be read as HTTP. The client erred, so the log has it at debug level only.

        Raises the ConnectionError of a handler whose client disconnected: aiohttp then ends the connection.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        _log.debug("not HTTP, from %s: %s", request.remote, exc)
        words = self._line.split(b" ", 2)
        path = words[1].partition(b"?")[0].decode(errors="replace") if len(words) > 1 else "/"
        error: RequestError = MalformedRequestError(exc.message)
        if isinstance(exc, ContentEncodingError):
            error = UnsupportedCodingError(exc.message.partition(": ")[2].partition(".")[0])
        response = error_response(self._dialects.of_path(path), error)
        response.force_close()
        return response

    def data_received(self, data: bytes) -> None:
        """Note what may be the beginning of a request, of which aiohttp tells nothing if it cannot read it."""
        self._line = data[:_MOST_LINE_BYTES].partition(b"\r\n")[0]
        if self._on_data is not None:
            self._on_data(len(data))
        super().data_received(data)


@web.middleware
async def mark_serving(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Stamp the arrival and mark the connection as in use. This is the outermost middleware."""
    request[ARRIVED] = time.monotonic()
    connection = request.protocol
    assert isinstance(connection, Connection)
    with connection.serving():
        return await handler(request)

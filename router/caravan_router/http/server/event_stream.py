"""Events on one response, server-sent or lines of JSON: kept alive while silent and cut when nobody reads."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from caravan_router.http.limits import Limits

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Framing:
    """``keep_alive``: what readers pass over; None where there is no such thing."""

    content_type: str
    keep_alive: bytes | None


SERVER_SENT = Framing("text/event-stream", b":\n\n")
# A line of JSON each. Clients take every line for JSON, an empty one too.
LINES = Framing("application/x-ndjson", None)

# Set on a request whose response has begun: errors can no longer become a status.
STREAM_BEGUN = web.RequestKey("stream_begun", bool)


# What JSON lets stand in a text, but many clients' line readers take for the end of a line: NEL, LS and PS.
_LINE_ENDS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}


def one_line(data: bytes) -> bytes:
    """JSON that no reader of lines breaks up."""
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for raw, escaped in _LINE_ENDS.items():
            data = data.replace(raw, escaped)
    return data


def event(data: bytes) -> bytes:
    """One event. ``data`` is JSON: nothing in it can end the event."""
    return b"data: %b\n\n" % one_line(data)


class EventStream:
    """Use as an async context manager: entering sends the headers, leaving without an error ends the body,
    and leaving because the client has gone is not an error.

    ``send`` waits only while this client's buffers are full. What it writes is flushed by the transport once a loop
    iteration, so tokens that are ready together leave in one system call.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], limits: Limits, framing: Framing = SERVER_SENT
    ) -> None:
        self._request = request
        self._keep_alive = framing.keep_alive
        self._limits = limits
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": framing.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._pulse: asyncio.Task[None] | None = None
        self._written_at = time.monotonic()
        # Reading of the clock when the write under way began; None between writes.
        self._blocked_since: float | None = None

    async def __aenter__(self) -> Self:
        self._request[STREAM_BEGUN] = True
        await self.response.prepare(self._request)
        self._pulse = asyncio.create_task(self._keep_alive_or_cut())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._pulse is not None
        try:
            if error is None:
                self._blocked_since = time.monotonic()
                await self.response.write_eof()
        except ConnectionResetError as reset:
            error = reset
        finally:
            self._pulse.cancel()
        # The client has gone: there is nobody to tell, and nothing has failed.
        return isinstance(error, ConnectionResetError)

    async def send(self, data: bytes) -> None:
        """Raises ConnectionResetError when the client has gone or was cut."""
        now = self._blocked_since = time.monotonic()
        await self.response.write(data)
        self._blocked_since = None
        self._written_at = now

    async def _keep_alive_or_cut(self) -> None:
        tick_s = min(self._limits.keep_alive_s, self._limits.slow_client_timeout_s) / 4
        while (transport := self._request.transport) is not None:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if self._blocked_since is not None:
                if now - self._blocked_since >= self._limits.slow_client_timeout_s:
                    transport.abort()
                    return
            elif (
                self._keep_alive is not None
                and now - self._written_at >= self._limits.keep_alive_s
                and transport.get_write_buffer_size() == 0
            ):
                # The buffer is empty, so this write does not wait.
                await self.response.write(self._keep_alive)
                self._written_at = now

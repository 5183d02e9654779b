"""Streamed responses, server-sent events or lines of JSON, with keep-alive comments; slow readers are cut off."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from aiohttp import web

from caravan_dialects.api.limits import Limits
from caravan_dialects.api.stream import SERVER_SENT, Framing
from caravan_router.http.server.pulse import Pulse
from caravan_router.http.server.state import ENDING

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter


T = TypeVar("T")


@contextlib.asynccontextmanager
async def until_the_end(request: web.Request, items: AsyncGenerator[T, None]) -> AsyncIterator[AsyncIterator[T]]:
    """Give ``items``, which never end, until the server ends. Close them."""
    async with contextlib.aclosing(items), contextlib.aclosing(_until_the_end(request, items)) as found:
        yield found


async def _until_the_end(request: web.Request, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    ending = asyncio.create_task(request.app[ENDING].wait())
    coming = asyncio.ensure_future(anext(items))
    try:
        while True:
            await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return
            yield coming.result()
            coming = asyncio.ensure_future(anext(items))
    finally:
        ending.cancel()
        coming.cancel()
        await asyncio.wait({coming})


# Set once a streamed response has started: errors can no longer become a status.
STREAM_BEGUN = web.RequestKey("stream_begun", bool)


class EventStream:
    """A streamed response, used as an async context manager.

    Entering sends the headers; leaving without an error ends the body. A client that disconnected is not an error.
    ``send`` waits only while this client's buffers are full. Messages of one call leave in one write.
    """

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], limits: Limits, framing: Framing = SERVER_SENT
    ) -> None:
        self._request = request
        self._framing = framing
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": framing.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._writer: AbstractStreamWriter
        response, comment = self.response, framing.keep_alive
        self._pulse = Pulse(request, limits, None if comment is None else lambda: response.write(comment))
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._request[STREAM_BEGUN] = True
        writer = await self.response.prepare(self._request)
        assert writer is not None
        self._writer = writer
        self._beating = asyncio.create_task(self._pulse.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._beating is not None
        try:
            if error is None:
                self._pulse.blocked_since = time.monotonic()
                await self.response.write_eof(self._framing.end)
        except ConnectionError as lost:
            error = lost
        finally:
            self._beating.cancel()
        # The client has disconnected: nothing failed.
        return isinstance(error, ConnectionError)

    async def send(self, *messages: bytes) -> None:
        """Write JSON ``messages``, if any. Raises ConnectionError when the client has disconnected or was cut."""
        if not messages:
            return
        frame = self._framing.frame
        data = frame(messages[0]) if len(messages) == 1 else b"".join(map(frame, messages))
        pulse = self._pulse
        pulse.written_at = pulse.blocked_since = time.monotonic()
        # Not through the response, which would check at each event that it has been prepared.
        await self._writer.write(data)
        pulse.blocked_since = None

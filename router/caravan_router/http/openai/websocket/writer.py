"""Writes the messages of one WebSocket connection, in the order in which its tasks send them."""

import asyncio
import time

import msgspec
from aiohttp import WSMsgType, web

from caravan_dialects.api.error_table import headers_of, kind_of
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.errors import openai_error, openai_status
from caravan_dialects.api.openai.responses.socket_schema import ErrorEvent, StreamId
from caravan_dialects.api.stream import data_of
from caravan_router.http.server.pulse import Pulse

_ENCODER = msgspec.json.Encoder()


def error_event(error: Exception, lane: StreamId = msgspec.UNSET) -> ErrorEvent:
    """Return what a client gets in place of a response."""
    told = msgspec.to_builtins(openai_error(error))
    if headers := headers_of(error):
        told["headers"] = headers
    return ErrorEvent(status=openai_status(kind_of(error)), error=told, stream_id=lane)


class SocketWriter:
    """Several tasks may send at a time. Sending waits only while this client's buffers are full.

    ``pulse`` sends pings to a client that gets nothing else. They need no answer: many programs read nothing while they
    run a tool.
    """

    def __init__(self, request: web.Request, socket: web.WebSocketResponse, limits: Limits) -> None:
        self._socket = socket
        # Fair: who waits first sends first.
        self._sending = asyncio.Lock()
        self.pulse = Pulse(request, limits, socket.ping)

    async def send(self, *messages: bytes) -> None:
        """Send ``messages`` as `named` made them. Raises ConnectionError when the client has disconnected."""
        await self._send([data_of(message) for message in messages])

    async def tell(self, event: msgspec.Struct) -> None:
        """Send an event. Raises ConnectionError when the client has disconnected."""
        await self._send([_ENCODER.encode(event)])

    async def _send(self, messages: list[bytes]) -> None:
        async with self._sending:
            for message in messages:
                self.pulse.written_at = self.pulse.blocked_since = time.monotonic()
                await self._socket.send_frame(message, WSMsgType.TEXT)
                self.pulse.blocked_since = None

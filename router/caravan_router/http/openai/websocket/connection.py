"""One WebSocket connection of ``/v1/responses``, from the handshake to its end."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from caravan_dialects.api.body import decode
from caravan_dialects.api.errors import (
    BodiesTooLargeError,
    ConnectionLimitError,
    DecodedBodyTooLargeError,
    EndingError,
    MalformedRequestError,
    RequestError,
    UpgradeRequiredError,
)
from caravan_dialects.api.openai.responses.rules import event_type_error
from caravan_dialects.api.openai.responses.socket_schema import CREATE, STEER, ClientEvent, SteerEvent, StreamId
from caravan_router.http.openai.websocket.lanes import Lanes, Message
from caravan_router.http.openai.websocket.responder import Responder
from caravan_router.http.openai.websocket.writer import SocketWriter, error_event
from caravan_router.http.server.body import SHARE, payload_limit
from caravan_router.http.server.connection import Connection
from caravan_router.http.server.event_stream import STREAM_BEGUN
from caravan_router.http.server.state import ENDING, STATE

_HEADS = msgspec.json.Decoder(ClientEvent)
_STEERS = msgspec.json.Decoder(SteerEvent)
# How long a client has for the answer to the last message.
_CLOSING_S = 2.0


async def answer_socket(request: web.Request) -> web.StreamResponse:
    """Serve a connection until it ends. Raises UpgradeRequiredError, EndingError, MalformedRequestError."""
    limits = request.app[STATE].limits
    if not limits.websockets:
        raise UpgradeRequiredError("WebSocket connections are switched off here. Use POST /v1/responses")
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise UpgradeRequiredError("GET /v1/responses takes WebSocket connections only. Use POST for a request")
    if request.app[ENDING].is_set():
        raise EndingError
    socket = web.WebSocketResponse(
        timeout=_CLOSING_S, max_msg_size=payload_limit(request.app[STATE]), decode_text=False
    )
    if not socket.can_prepare(request):
        raise MalformedRequestError("the WebSocket handshake is not complete")
    await _SocketConnection(request, socket).run()
    return socket


class _SocketConnection:
    def __init__(self, request: web.Request, socket: web.WebSocketResponse) -> None:
        self._request = request
        self._socket = socket
        self._limits = request.app[STATE].limits
        self._writer = SocketWriter(request, socket, self._limits)
        self._room = request[SHARE]
        self._responder = Responder(request, self._writer, self._room)
        self._lanes = Lanes(self._responder.respond)
        # Bytes that came and were not read yet.
        self._unread = 0
        # Set when no more requests are taken.
        self._refusal: RequestError | None = None

    async def run(self) -> None:
        """Serve to the end."""
        await self._socket.prepare(self._request)
        self._request[STREAM_BEGUN] = True
        connection = self._request.protocol
        assert isinstance(connection, Connection)
        connection.count_data(self._count)
        tasks: list[asyncio.Task[Any]] = []

        def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
            tasks.append(asyncio.create_task(work))
            return tasks[-1]

        try:
            _, reading, closing = map(begin, (self._writer.pulse.run(), self._read(), self._until_refusing()))
            await asyncio.wait({reading, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading, begin(self._lanes.idle.wait())}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._lanes.close()
        await self._close()

    async def _close(self) -> None:
        code = WSCloseCode.OK
        with suppress(ConnectionError):
            if isinstance(self._refusal, ConnectionLimitError):
                await self._writer.tell(error_event(self._refusal))
                code = WSCloseCode.GOING_AWAY
            elif self._refusal is not None:
                code = WSCloseCode.SERVICE_RESTART
            await self._socket.close(code=code)

    async def _until_refusing(self) -> None:
        """Wait for the end of the server, or of the time that a connection may be open."""
        life_s = self._limits.socket_life_s
        try:
            async with asyncio.timeout(life_s):
                await self._request.app[ENDING].wait()
            self._refusal = EndingError()
        except TimeoutError:
            self._refusal = ConnectionLimitError(life_s)

    def _count(self, size: int) -> None:
        """Count bytes that have come. A connection for which there is no room ends."""
        try:
            self._room.grow(size)
            self._unread += size
        except (BodiesTooLargeError, DecodedBodyTooLargeError):
            if self._request.transport is not None:
                self._request.transport.abort()

    async def _read(self) -> None:
        with suppress(ConnectionError):
            async for message in self._socket:
                self._room.shrink(self._unread)
                self._unread = 0
                if message.type in {WSMsgType.TEXT, WSMsgType.BINARY}:
                    await self._take(message.data)

    async def _take(self, data: bytes) -> None:
        lane: StreamId = msgspec.UNSET
        try:
            head = decode(data, _HEADS)
            lane = msgspec.UNSET if head.stream_id is None else head.stream_id
            if head.type == STEER:
                await self._responder.steer(decode(data, _STEERS), len(data))
            elif head.type == CREATE:
                self._add(head, data)
            else:
                raise event_type_error(head.type)
        except RequestError as error:
            await self._writer.tell(error_event(error, lane))

    def _add(self, head: ClientEvent, data: bytes) -> None:
        if self._refusal is not None:
            raise self._refusal
        share = self._room.another()
        share.grow(len(data))
        try:
            self._lanes.add(Message(data, head.stream_id, share))
        except RequestError:
            share.release()
            raise

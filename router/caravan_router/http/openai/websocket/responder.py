"""Answers the requests of one WebSocket connection, as those of ``POST /v1/responses``, and steers their responses."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from caravan_dialects.api.body import most_decoded_bytes
from caravan_dialects.api.errors import BodiesTooLargeError, DecodedBodyTooLargeError, RequestError
from caravan_dialects.api.generation.reading import BodyReader
from caravan_dialects.api.openai.responses.reply import AskedResponse, ResponseAnswer
from caravan_dialects.api.openai.responses.rules import background_on_socket_error
from caravan_dialects.api.openai.responses.socket_schema import (
    CreateEvent,
    Steer,
    SteerError,
    SteerEvent,
    SteeringEvent,
    StreamId,
)
from caravan_dialects.api.openai.responses.steering import (
    MAX_PENDING,
    WAITING,
    Steering,
    check_steering,
    required_input,
    steer_error,
    uncommitted,
    with_steering,
)
from caravan_dialects.api.openai.responses.turn import begun_turn, conversation_id
from caravan_dialects.api.openai.responses.validation import check_request, generates
from caravan_dialects.conversations.local import LocalResponses
from caravan_dialects.conversations.nodes import new_id
from caravan_router.http.generation.answer import REMEMBERED, admitted
from caravan_router.http.generation.models import counting_refusals
from caravan_router.http.openai.background import note_skipped
from caravan_router.http.openai.websocket.lanes import Message
from caravan_router.http.openai.websocket.writer import SocketWriter, error_event
from caravan_router.http.server.authentication import find_client
from caravan_router.http.server.body import SHARE, BodyShare, keep_body
from caravan_router.http.server.ignored import note_ignored
from caravan_router.http.server.middleware import errors_as_json, identify_and_log
from caravan_router.http.server.state import ARRIVED, CLIENT, NAMED_MODEL, RUNNING, STATE, owner_of
from caravan_scheduler.core.errors import EngineError

# What a connection remembers of responses that have ended, or wait for results.
_MOST_REMEMBERED = 64
_FULL = (BodiesTooLargeError, DecodedBodyTooLargeError)
_CREATE = BodyReader(CreateEvent)


@dataclass(slots=True, eq=False)
class _Active:
    """A response that is generated. ``steers``: input for its successor."""

    body: CreateEvent
    answer: ResponseAnswer
    steers: list[Steering] = field(default_factory=list)

    @property
    def lane(self) -> StreamId:
        return msgspec.UNSET if self.body.stream_id is None else self.body.stream_id


@dataclass(slots=True, eq=False)
class _Turn:
    """One request. ``body``: once it was read. ``steers``: input that it commits. ``active``: once it has begun."""

    body: CreateEvent | None = None
    steers: Sequence[Steering] = ()
    active: _Active | None = None
    error: Exception | None = None
    failed: bool = False


class Responder:
    """The responses of one connection: those under way, and what it knows of earlier ones."""

    def __init__(self, request: web.Request, writer: SocketWriter, room: BodyShare) -> None:
        """``request``: the one that opened the connection. ``room``: what the connection holds beside its requests."""
        self._request = request
        self._writer = writer
        self._room = room
        self._local = LocalResponses(room, _FULL)
        self._active: dict[str, _Active] = {}
        self._ended: dict[str, None] = {}
        # Input for the successors of responses that wait for the results of their calls.
        self._waiting: dict[str, _Active] = {}

    async def respond(self, message: Message) -> None:
        """Answer a request, and the steering of its response. Raises ConnectionError."""
        turn = _Turn()
        await self._answer(turn, message.share, lambda request: self._read(request, turn, message))
        if turn.error is not None:
            lane = msgspec.UNSET if message.lane is None else message.lane
            await self._writer.tell(error_event(turn.error, lane))
        while (following := await self._following(turn)) is not None:
            turn = following
            share = self._room.another()
            try:
                await self._answer(turn, share, lambda _: None)
            finally:
                share.release()

    def _read(self, request: web.Request, turn: _Turn, message: Message) -> None:
        data = message.take_data()
        share = request[SHARE]
        # It was counted when it came.
        share.shrink(len(data))
        keep_body(request, data)
        share.grow(most_decoded_bytes(data))
        body, ignored = _CREATE.read(data, exact=False)
        note_ignored(request, ignored)
        request[NAMED_MODEL] = body.model or ""
        check_request(body)
        if body.background:
            raise background_on_socket_error()
        turn.body = msgspec.structs.replace(body, stream=True)
        if (before := self._waiting.pop(body.previous_response_id or "", None)) is not None:
            turn.steers = before.steers
            turn.body = msgspec.structs.replace(turn.body, **with_steering(body, before.steers))

    async def _answer(self, turn: _Turn, share: BodyShare, read: Callable[[web.Request], None]) -> None:
        """Answer one request as if it had come on its own."""
        request = self._request.clone(method="POST")
        request[ARRIVED] = time.monotonic()
        request[SHARE] = share

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                keyring = request.app[STATE].keyring
                if keyring is not None:
                    # It may have been taken away meanwhile.
                    request[CLIENT] = find_client(keyring, request)
                read(request)
                await self._generate(request, turn)
            except Exception as error:
                turn.error = error
                raise
            return web.Response()

        async def told(request: web.Request) -> web.StreamResponse:
            return await errors_as_json(request, counting_refusals(handle))

        await identify_and_log(request, told)
        if turn.error is not None or turn.failed:
            # As OpenAI has it: what a failed request continued is not continued any more.
            self._local.drop((turn.body and turn.body.previous_response_id) or "")
        if turn.active is None:
            await self._return(turn, turn.steers, uncommitted(turn.error or RequestError()))
        else:
            self._free(turn.steers)

    async def _generate(self, request: web.Request, turn: _Turn) -> None:
        body, app = turn.body, request.app
        assert body is not None
        store, running, owner = app[STATE].store, app[RUNNING], owner_of(request)
        async with begun_turn(store, running, owner, body, extends=True, local=self._local) as begun:
            asked = AskedResponse(body, begun, app[REMEMBERED])
            note_skipped(app, asked)
            with running.listing(asked.running), ExitStack() as held:
                try:
                    answer, progress = await admitted(request, asked, held)
                except asked.errors_as_events as error:
                    turn.failed = True
                    await self._writer.send(*asked.error_messages(error))
                    return
                assert isinstance(answer, ResponseAnswer)
                turn.active = self._active[asked.running.id] = _Active(body, answer)
                try:
                    with held:
                        async with progress.generating() as runs:
                            await answer.stream(self._writer, runs)
                except (EngineError, RequestError) as error:
                    turn.failed = True
                    await self._writer.send(*asked.error_messages(error))
                finally:
                    del self._active[asked.running.id]
                    self._ended[asked.running.id] = None
                    while len(self._ended) > _MOST_REMEMBERED:
                        del self._ended[next(iter(self._ended))]

    async def steer(self, event: SteerEvent, size: int) -> None:
        """Steer a response. ``size``: of the message, in bytes. Raises ConnectionError."""
        target = event.previous_response_id
        active = self._active.get(target)
        error = self._refusal(event, active) or self._take(size)
        if error is not None or active is None:
            lane = msgspec.UNSET if active is None else active.lane
            number = 0 if active is None else active.answer.take_number()
            refused = Steer(previous_response_id=target, input=event.input)
            await self._tell("failed", number, refused, lane, error=error or steer_error("response_not_found"))
            return
        one = Steering(id=new_id("steer"), target=target, given=event.input, size=size)
        active.steers.append(one)
        number = active.answer.take_number()
        # Its end is told after this event, since messages go out in the order in which they were sent.
        active.answer.steer()
        await self._tell("accepted", number, Steer(id=one.id, previous_response_id=target), active.lane)

    def _refusal(self, event: SteerEvent, active: _Active | None) -> SteerError | None:
        if active is None:
            known = event.previous_response_id in self._ended
            return steer_error("response_already_completed" if known else "response_not_found")
        if conversation_id(active.body) is not None or not generates(active.body):
            return steer_error("steering_not_supported")
        if len(active.steers) >= MAX_PENDING:
            return steer_error("too_many_pending_steers")
        return check_steering(event.input)

    def _take(self, size: int) -> SteerError | None:
        try:
            self._room.grow(size)
        except _FULL:
            return steer_error("too_many_pending_steers")
        return None

    async def _following(self, turn: _Turn) -> _Turn | None:
        """Return the turn that follows by itself, or tell what becomes of the steering of this one."""
        active = turn.active
        if active is None or not active.steers:
            return None
        response = active.answer.response()
        if response.status in {"failed", "cancelled"} or turn.error is not None:
            await self._return(turn, active.steers, steer_error("response_not_active"))
            return None
        if required := required_input(response.output):
            if len(self._waiting) >= _MOST_REMEMBERED:
                await self._return(turn, active.steers, steer_error("too_many_pending_steers"))
                return None
            self._waiting[response.id] = active
            for one in active.steers:
                steer = Steer(id=one.id, previous_response_id=one.target)
                number = active.answer.take_number()
                await self._tell("pending", number, steer, active.lane, reason=WAITING, required_input=required)
            return None
        body = msgspec.structs.replace(active.body, previous_response_id=response.id, input=None)
        body = msgspec.structs.replace(body, **with_steering(body, active.steers))
        return _Turn(body=body, steers=active.steers)

    async def _return(self, turn: _Turn, steers: Sequence[Steering], error: SteerError) -> None:
        """Return input that no response has taken."""
        self._free(steers)
        active = turn.active
        lane = msgspec.UNSET if turn.body is None or turn.body.stream_id is None else turn.body.stream_id
        for one in steers:
            steer = Steer(id=one.id, previous_response_id=one.target, input=one.given)
            await self._tell("failed", 0 if active is None else active.answer.take_number(), steer, lane, error=error)

    def _free(self, steers: Sequence[Steering]) -> None:
        self._room.shrink(sum(one.size for one in steers))

    async def _tell(self, what: str, number: int, steer: Steer, lane: StreamId, **fields: Any) -> None:
        kind = f"response.steer.{what}"
        event = SteeringEvent(type=kind, sequence_number=number, steer=steer, stream_id=lane, **fields)
        await self._writer.tell(event)

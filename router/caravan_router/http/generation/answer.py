"""Answers generating requests of every dialect: permits, validation, submission, then a whole or a streamed reply.

A dialect describes its part as a `Reply`; its handler is ``answer(request, SomeReply(body, limits))``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import ClassVar

from aiohttp import web

from caravan_router.core.errors import EngineError
from caravan_router.core.trace import ServedRequest
from caravan_router.http.generation.context import Context, context_of
from caravan_router.http.generation.headers import compute_headers, timing_headers
from caravan_router.http.generation.in_progress import IN_PROGRESS, RequestInProgress
from caravan_router.http.generation.models import asked_model, metrics_of, model_name
from caravan_router.http.generation.permits import counting_failures, holding_permits
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run, on_all
from caravan_router.http.server.dialect import Dialect
from caravan_router.http.server.errors import RequestError
from caravan_router.http.server.event_stream import SERVER_SENT, EventStream, Framing
from caravan_router.http.server.state import STATE


class Reply(ABC):
    """One dialect's reply to one request. A handler makes it from the body; `answer` calls its methods in order."""

    dialect: ClassVar[Dialect]
    framing: ClassVar[Framing] = SERVER_SENT
    # Validation errors of these types become an event after status 200 when the reply is streamed.
    errors_as_events: ClassVar[tuple[type[Exception], ...]] = ()

    # What is generated, in the terms of OpenTelemetry (`ServedRequest`).
    operation: str = "text_completion"
    # The field of the body that names a model or an adapter.
    model: str | None = None
    # Permits to hold: one for each candidate of each prompt.
    generations: int = 1
    streamed: bool = False
    # Length of the prompt as written, for the headers of an error that is sent as an event.
    characters: int = 0

    def asks_for(self, request: web.Request) -> str:
        """Return the name of the model or adapter that the request asks for; "" for the default."""
        return asked_model(request, self.model)

    @abstractmethod
    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        """Check the body. Raises RequestError, EngineError."""

    @abstractmethod
    async def whole(self, runs: Sequence[Run]) -> bytes:
        """Read all runs and return the JSON body. Raises EngineError."""

    async def send(self, events: EventStream, index: int, run: Run) -> None:
        """Stream one run. Raises EngineError. Replies that are never streamed do not implement it."""
        raise NotImplementedError

    def error_messages(self, error: Exception) -> Sequence[bytes]:
        """Return the messages that end a stream with ``error``."""
        return (self.dialect.body(error, ""),)

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        """Return the JSON of the event after all runs have ended well; None if there is none."""
        return None


async def answer(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Answer a generating request. Raises RequestError and EngineError before a response has started."""
    state, generations = request.app[STATE], reply.generations
    asked = reply.asks_for(request)
    metrics = metrics_of(state, asked)
    metrics.request_arrived(generations)
    with ExitStack() as held:
        try:
            with counting_failures(metrics, generations), metrics.validating(generations):
                name = model_name(state.fleet, asked)
                held.enter_context(holding_permits(request, name, generations))
                progress = held.enter_context(request.app[IN_PROGRESS].listing(request))
                async with progress.abortable():
                    context = await context_of(request, asked)
                    progress.valid = await reply.validate(context)
                    progress.model = context.served
                    model = context.model.name
                    progress.trace.serves(
                        ServedRequest(asked=asked, model=model, operation=reply.operation, streamed=reply.streamed)
                    )
        except reply.errors_as_events as error:
            if not reply.streamed:
                raise
            return await _send_error(request, reply, error)
        if reply.streamed:
            return await _stream(request, reply, progress, held)
        async with progress.generating() as runs:
            body = await reply.whole(runs)
        headers = timing_headers(state, progress.valid, runs)
        return web.Response(body=body, headers=headers, content_type="application/json")


async def _stream(
    request: web.Request, reply: Reply, progress: RequestInProgress, held: ExitStack
) -> web.StreamResponse:
    """Stream all generations. ``held`` is released when they end, without waiting for the client to read."""
    state = request.app[STATE]
    headers = compute_headers(state, sum(one.characters for one in progress.valid))
    async with EventStream(request, headers, state.limits, reply.framing) as events:

        async def send(index: int, run: Run) -> None:
            await reply.send(events, index, run)

        try:
            with held:
                async with progress.generating() as runs:
                    await on_all(runs, send)
        except (EngineError, RequestError) as error:
            await events.send(*reply.error_messages(error))
        else:
            if (last := reply.last_event(runs)) is not None:
                await events.send(last)
    return events.response


async def _send_error(request: web.Request, reply: Reply, error: Exception) -> web.StreamResponse:
    state = request.app[STATE]
    async with EventStream(request, compute_headers(state, reply.characters), state.limits, reply.framing) as events:
        await events.send(*reply.error_messages(error))
    return events.response

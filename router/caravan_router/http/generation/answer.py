"""Answers generating requests of every dialect: permits, validation, submission, then a whole or a streamed reply.

A dialect describes its part as an `Asked`; its handler is ``answer(request, AskedSo(body, limits))``, decorated with
`counting_refusals` for what fails before.
"""

from contextlib import ExitStack

from aiohttp import web

from caravan_dialects.api.errors import RequestError
from caravan_dialects.api.generation.answer import Answer
from caravan_dialects.api.generation.asked import Asked
from caravan_dialects.api.generation.in_progress import RequestInProgress
from caravan_dialects.api.generation.models import model_name
from caravan_dialects.api.generation.permits import holding_permits
from caravan_dialects.api.generation.run import Run, on_all
from caravan_router.http.generation.context import context_of
from caravan_router.http.generation.counting import counting_request
from caravan_router.http.generation.headers import compute_headers, timing_headers
from caravan_router.http.generation.in_progress import in_progress
from caravan_router.http.generation.models import header_model, metrics_of
from caravan_router.http.server.body import forget_body
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.state import CLIENT, STATE
from caravan_scheduler.core.errors import EngineError
from caravan_scheduler.core.trace import ServedRequest


async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Answer a generating request. Raises RequestError and EngineError before a response has started."""
    forget_body(request)
    state, generations = request.app[STATE], asked.generations
    named = asked.asks_for(header_model(request), state.fleet)
    metrics = metrics_of(state, named)
    with ExitStack() as held:
        try:
            with counting_request(request, metrics, generations), metrics.validating(generations):
                name = model_name(state.fleet, named)
                permits = generations if asked.permits is None else asked.permits
                held.enter_context(holding_permits(request[CLIENT], state.permits.of(name), permits))
                progress = held.enter_context(in_progress(request))
                async with progress.abortable():
                    context = await context_of(request, named)
                    context.check_generates()
                    reply = await asked.validate(context)
                    progress.begin(context.served, reply.requests)
                    progress.trace.serves(
                        ServedRequest(
                            asked=named, model=context.model.name, operation=asked.operation, streamed=asked.streamed
                        )
                    )
        except asked.errors_as_events as error:
            if not asked.streamed:
                raise
            return await _send_error(request, asked, error)
        if asked.streamed:
            return await _stream(request, asked, reply, progress, held)
        async with progress.generating() as runs:
            body = await reply.whole(runs)
        headers = timing_headers(state, reply.requests, runs)
        return web.Response(body=body, headers=headers, content_type="application/json")


async def _stream(
    request: web.Request, asked: Asked, reply: Answer, progress: RequestInProgress, held: ExitStack
) -> web.StreamResponse:
    """Stream all generations. ``held`` is released when they end, without waiting for the client to read."""
    state = request.app[STATE]
    headers = compute_headers(state, sum(one.characters for one in reply.requests))
    async with EventStream(request, headers, state.limits, asked.framing) as events:

        async def send(index: int, run: Run) -> None:
            await reply.send(events, index, run)

        try:
            with held:
                async with progress.generating() as runs:
                    await on_all(runs, send)
        except (EngineError, RequestError) as error:
            await events.send(*asked.error_messages(error))
        else:
            if (last := reply.last_event(runs)) is not None:
                await events.send(last)
    return events.response


async def _send_error(request: web.Request, asked: Asked, error: Exception) -> web.StreamResponse:
    state = request.app[STATE]
    async with EventStream(request, compute_headers(state, asked.characters), state.limits, asked.framing) as events:
        await events.send(*asked.error_messages(error))
    return events.response

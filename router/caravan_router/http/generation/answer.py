"""Answers generating requests of every dialect: permits, validation, submission, then a whole or a streamed reply.

A dialect describes its part as an `Asked`; its handler is ``answer(request, AskedSo(body, limits))``, decorated with
`counting_refusals` for what fails before.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from aiohttp import web

from caravan_dialects.api.errors import RequestError
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.comparison import RememberedRequests
from caravan_dialects.api.generation.context import model_name
from caravan_dialects.api.generation.in_progress import RequestInProgress, RequestsInProgress
from caravan_dialects.api.generation.permits import holding_permits
from caravan_dialects.api.generation.run import Run, ValidRequest
from caravan_router.http.generation.models import context_of, counting_request, header_model, metrics_of
from caravan_router.http.server.body import forget_body
from caravan_router.http.server.dialect import path_of
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.state import ARRIVED, CLIENT, STATE, TRACE, AppState, owner_of
from caravan_scheduler.core.errors import EngineError
from caravan_scheduler.core.generation import shown_session
from caravan_scheduler.core.trace import ServedRequest


def compute_headers(state: AppState, characters: int) -> dict[str, str]:
    """Return the headers that are known before the first token."""
    return {"x-compute-type": state.info.compute_type, "x-compute-characters": str(characters)}


def timing_headers(state: AppState, requests: Sequence[ValidRequest], runs: Sequence[Run]) -> dict[str, str]:
    """Return the headers of a reply that is sent whole.

    Times are sums over ``runs``; each prompt of ``requests`` counts once. x-compute-time is in seconds, the others in
    milliseconds.
    """
    timings = [run.timings() for run in runs]
    tokens = sum(run.tokens for run in runs)
    total = sum(timing.total_s for timing in timings)
    inference = sum(timing.inference_s for timing in timings)
    return {
        **compute_headers(state, sum(request.characters for request in requests)),
        "x-compute-time": f"{total:.6f}",
        "x-total-time": _milliseconds(total),
        "x-validation-time": _milliseconds(sum(timing.validation_s for timing in timings)),
        "x-queue-time": _milliseconds(sum(timing.queue_s for timing in timings)),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(1, tokens)),
        "x-prompt-tokens": str(sum(len(request.prompt) for request in requests)),
        "x-generated-tokens": str(tokens),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


IN_PROGRESS = web.AppKey("in_progress", RequestsInProgress)
# Hashes of requests, for those that want to be compared with them.
REMEMBERED = web.AppKey("remembered", RememberedRequests)


@contextmanager
def in_progress(request: web.Request) -> Iterator[RequestInProgress]:
    """List ``request`` until the end of the block."""
    entry = RequestInProgress(
        request_id=request[REQUEST_ID],
        owner=owner_of(request),
        route=path_of(request),
        arrived=request[ARRIVED],
        trace=request[TRACE],
    )
    with request.app[IN_PROGRESS].listing(entry):
        yield entry


async def admitted(request: web.Request, asked: Asked, held: ExitStack) -> tuple[Answer, RequestInProgress]:
    """Return the answer to a generating request, and its place among those in progress.

    ``held`` gets what the request holds until its generations have ended. Raises RequestError and EngineError.
    """
    forget_body(request)
    state, generations = request.app[STATE], asked.generations
    named = asked.asks_for(header_model(request), state.fleet)
    metrics = metrics_of(state, named)
    with counting_request(request, metrics, generations), metrics.validating(generations):
        name = model_name(state.fleet, named)
        permits = generations if asked.permits is None else asked.permits
        held.enter_context(holding_permits(request[CLIENT], state.permits.of(name), permits))
        progress = held.enter_context(in_progress(request))
        async with progress.abortable():
            context = await context_of(request, named)
            context.check_generates()
            reply = await asked.validate(context)
            progress.begin(context.served, reply)
            progress.trace.serves(
                ServedRequest(
                    asked=named,
                    model=context.model.name,
                    operation=asked.operation,
                    streamed=asked.streamed,
                    session=shown_session(reply.requests[0].specs[0].session) if reply.requests else "",
                    gateway=context.sender.gateway.notes,
                )
            )
    return reply, progress


async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
    """Answer a generating request. Raises RequestError and EngineError before a response has started."""
    state = request.app[STATE]
    with ExitStack() as held:
        try:
            reply, progress = await admitted(request, asked, held)
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
        try:
            with held:
                async with progress.generating() as runs:
                    await reply.stream(events, runs)
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

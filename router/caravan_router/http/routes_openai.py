"""OpenAI's completions. Errors found before the stream began have their real status, as OpenAI and vLLM have it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import msgspec
from aiohttp import web

from caravan_router.engine.interface import EngineError
from caravan_router.http.body import read_body
from caravan_router.http.completion_text import FINISH_WORDS, logprobs_of
from caravan_router.http.errors import openai_body
from caravan_router.http.headers import compute_headers, timing_headers
from caravan_router.http.run import Run, admitted, validating
from caravan_router.http.schema_openai import Completion, CompletionChoice, CompletionRequest, Usage
from caravan_router.http.sse import DONE, EventStream, event
from caravan_router.http.state import STATE, AppState
from caravan_router.http.validation import ValidRequest, model_of
from caravan_router.http.validation_openai import split_prompts, validate_completion
from caravan_router.text.assembler import Piece

_DECODER = msgspec.json.Decoder(CompletionRequest)
_ENCODER = msgspec.json.Encoder()


async def completions(request: web.Request) -> web.StreamResponse:
    """One choice a prompt, in the order of the prompts."""
    arrived = time.monotonic()
    state = request.app[STATE]
    body = await read_body(request, _DECODER)
    prompts = split_prompts(body.prompt, state.limits)
    with admitted(state, len(prompts)):
        with validating(state.metrics, len(prompts)):
            valid = await validate_completion(state.engine, state.limits, body, prompts)
        if body.stream:
            return await _stream(request, body, valid, arrived)
        return await _whole(state, body, valid, arrived)


async def _whole(
    state: AppState, body: CompletionRequest, valid: Sequence[ValidRequest], arrived: float
) -> web.Response:
    collected: list[list[Piece]] = [[] for _ in valid]

    async def collect(index: int, run: Run) -> None:
        async for pieces in run.pieces:
            collected[index].extend(pieces)

    with ExitStack() as stack:
        runs = [stack.enter_context(Run(state, request, arrived)) for request in valid]
        await _all(runs, collect)
    reply = _envelope(state)
    reply.choices = [_choice(index, pieces, 0, body.logprobs) for index, pieces in enumerate(collected)]
    reply.usage = _usage(runs)
    return web.Response(
        body=_ENCODER.encode(reply), headers=timing_headers(state, runs), content_type="application/json"
    )


async def _stream(
    request: web.Request, body: CompletionRequest, valid: Sequence[ValidRequest], arrived: float
) -> web.StreamResponse:
    """Chunks of several choices come as they are ready; each names its choice."""
    state = request.app[STATE]
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    envelope = _envelope(state)
    if include_usage:
        envelope.usage = None
    headers = compute_headers(state, sum(one.characters for one in valid))
    async with EventStream(request, headers, state.limits) as events:

        async def send(index: int, run: Run) -> None:
            offset = 0
            async for pieces in run.pieces:
                choice = _choice(index, pieces, offset, body.logprobs)
                offset += len(choice.text)
                # Half a character, or a control token: nothing to show yet.
                if choice.text or choice.finish_reason is not None or choice.logprobs is not None:
                    # One chunk object for all choices: it is encoded before anything can change it.
                    envelope.choices = [choice]
                    await events.send(event(_ENCODER.encode(envelope)))

        try:
            with ExitStack() as stack:
                runs = [stack.enter_context(Run(state, one, arrived)) for one in valid]
                await _all(runs, send)
        except EngineError as error:
            await events.send(event(openai_body(error)))
        else:
            if include_usage:
                envelope.choices = []
                envelope.usage = _usage(runs)
                await events.send(event(_ENCODER.encode(envelope)))
        await events.send(DONE)
    return events.response


async def _all(runs: Sequence[Run], work: Callable[[int, Run], Awaitable[None]]) -> None:
    """``work`` on every run at once; the first error cancels the others and is raised as it is."""
    if len(runs) == 1:
        await work(0, runs[0])
        return

    async def one(index: int, run: Run) -> None:
        await work(index, run)

    try:
        async with asyncio.TaskGroup() as group:
            for index, run in enumerate(runs):
                group.create_task(one(index, run))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _envelope(state: AppState) -> Completion:
    model = model_of(state.engine)
    return Completion(
        id=f"cmpl-{time.time_ns():x}",
        object="text_completion",
        created=int(time.time()),
        model=model.name,
        system_fingerprint=model.fingerprint,
        choices=[],
    )


def _choice(index: int, pieces: Sequence[Piece], offset: int, logprobs: int | None) -> CompletionChoice:
    finish = pieces[-1].finish
    return CompletionChoice(
        index=index,
        text="".join([piece.text for piece in pieces]),
        logprobs=None if logprobs is None else logprobs_of(pieces, offset, logprobs),
        finish_reason=None if finish is None else FINISH_WORDS[finish],
    )


def _usage(runs: Sequence[Run]) -> Usage:
    prompt = sum(len(run.valid.spec.prompt) for run in runs)
    output = sum(run.tokens for run in runs)
    return Usage(prompt, output, prompt + output)

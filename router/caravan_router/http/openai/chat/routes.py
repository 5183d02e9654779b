"""Chat completions as OpenAI's and TGI's clients ask for them, and a conversation's tokens."""

import asyncio
import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from caravan_router.core.errors import EngineError
from caravan_router.http.generation.bounds import model_of
from caravan_router.http.generation.headers import compute_headers, timing_headers
from caravan_router.http.generation.permits import admitted, check_rate, validating
from caravan_router.http.generation.run import Run
from caravan_router.http.generation.runs import started, work_on_all
from caravan_router.http.generation.serving import serving_of
from caravan_router.http.openai.chat.output import ChatOutput, WholeOutput, chat_logprobs
from caravan_router.http.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_router.http.openai.chat.schema import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ChatTokens,
    ChunkChoice,
)
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, choices_asked, validate_chat
from caravan_router.http.openai.schema import PromptTokensDetails, Usage
from caravan_router.http.server.body import read_body
from caravan_router.http.server.errors import openai_body
from caravan_router.http.server.event_stream import DONE, EventStream, event
from caravan_router.http.server.state import CLIENT, STATE, AppState
from caravan_router.http.tgi.schema import TokenizedToken
from caravan_router.text.prompt_text import token_spans

_DECODER = msgspec.json.Decoder(ChatRequest)
_ENCODER = msgspec.json.Encoder()


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answers to a conversation, as text or as calls of the tools that were offered."""
    arrived = time.monotonic()
    state, client = request.app[STATE], request[CLIENT]
    body = await read_body(request, _DECODER)
    n = choices_asked(body, state.limits)
    with admitted(state, client, n):
        with validating(state.metrics, n):
            serving = serving_of(body, request.headers, client.key, state.limits)
            chat = await validate_chat(state, ChatSource(request=body), serving, n)
        if not body.stream:
            return await _whole(state, chat, arrived)
        include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await _stream(request, chat, arrived, include_usage=include_usage)


async def read_whole(runs: Sequence[Run], chat: ValidChat) -> list[WholeOutput]:
    """What each run says, to its end."""
    outputs = [WholeOutput(ChatOutput(chat.plan.parser())) for _ in runs]

    async def read(index: int, run: Run) -> None:
        async for pieces in run.pieces:
            outputs[index].push(pieces)
            if not outputs[index].output.wanted:
                run.pieces.end()

    await work_on_all(runs, read)
    return outputs


async def _whole(state: AppState, chat: ValidChat, arrived: float) -> web.Response:
    with started(state, [chat.request], arrived) as runs:
        outputs = await read_whole(runs, chat)
    reply = ChatCompletion(_new_id(), "chat.completion", int(time.time()), chat.model, _fingerprint(state), [])
    for index, whole in enumerate(outputs):
        assert whole.output.finish is not None
        logprobs = chat_logprobs(whole.pieces) if chat.logprobs else None
        reply.choices.append(ChatChoice(index, whole.message(), logprobs, whole.output.finish))
    reply.usage = _usage(chat, runs)
    headers = timing_headers(state, [chat.request], runs)
    return web.Response(body=_ENCODER.encode(reply), headers=headers, content_type="application/json")


async def _stream(request: web.Request, chat: ValidChat, arrived: float, *, include_usage: bool) -> web.StreamResponse:
    """Chunks of several choices come as they are ready; each names its choice."""
    state = request.app[STATE]
    chunk = ChatCompletionChunk(
        _new_id(), "chat.completion.chunk", int(time.time()), chat.model, _fingerprint(state), []
    )
    if include_usage:
        chunk.usage = None
    headers = compute_headers(state, chat.request.characters)
    async with EventStream(request, headers, state.limits) as events:

        async def send(index: int, run: Run) -> None:
            output = ChatOutput(chat.plan.parser())
            async for pieces in run.pieces:
                delta = output.delta(output.push(pieces), always=chat.logprobs)
                if not output.wanted:
                    run.pieces.end()
                if delta is not None:
                    logprobs = chat_logprobs(pieces) if chat.logprobs else None
                    # One chunk object for all choices: it is encoded before anything can change it.
                    chunk.choices = [ChunkChoice(index, delta, logprobs, output.finish)]
                    await events.send(event(_ENCODER.encode(chunk)))

        try:
            with started(state, [chat.request], arrived) as runs:
                await work_on_all(runs, send)
        except EngineError as error:
            await events.send(event(openai_body(error)))
        else:
            if include_usage:
                chunk.choices = []
                chunk.usage = _usage(chat, runs)
                await events.send(event(_ENCODER.encode(chunk)))
        await events.send(DONE)
    return events.response


async def chat_tokenize(request: web.Request) -> web.Response:
    """A conversation as the model gets it, and its tokens."""
    state = request.app[STATE]
    body = await read_body(request, _DECODER)
    check_rate(request[CLIENT])
    model = model_of(state.engine)
    prompt = await chat_prompt_of(state, model, chat_plan_of(state, model, body))
    # Long texts take long: streams go on meanwhile.
    spans = await asyncio.to_thread(token_spans, prompt.text, prompt.tokens)
    tokens = [TokenizedToken(span.token_id, span.text, span.start, span.stop) for span in spans]
    return web.Response(body=_ENCODER.encode(ChatTokens(tokens, prompt.text)), content_type="application/json")


def _new_id() -> str:
    return f"chatcmpl-{time.time_ns():x}"


def _fingerprint(state: AppState) -> str:
    return model_of(state.engine).fingerprint


def _usage(chat: ValidChat, runs: Sequence[Run]) -> Usage:
    prompt = len(chat.request.prompt)
    output = sum(run.tokens for run in runs)
    # The first is asked: what the others share with it was not there before.
    return Usage(prompt, output, prompt + output, PromptTokensDetails(runs[0].pieces.cached_tokens))

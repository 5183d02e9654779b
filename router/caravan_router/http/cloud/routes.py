"""The one route that SageMaker knows, and the one that Vertex AI does."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from caravan_router.http.cloud.schema import VertexRequest, VertexResponse
from caravan_router.http.generation.candidates import best_first
from caravan_router.http.generation.permits import admitted, validating
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.rules import (
    BodyMismatchError,
    EmptyPromptError,
    TooManyPromptsError,
    UnsupportedFieldError,
)
from caravan_router.http.generation.run import Run
from caravan_router.http.generation.runs import collect, started, together
from caravan_router.http.generation.serving import serving_of
from caravan_router.http.openai.chat import routes as routes_chat
from caravan_router.http.openai.chat.schema import ChatRequest
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, validate_chat
from caravan_router.http.openai.completions import routes as routes_openai
from caravan_router.http.server.body import decode, read_body
from caravan_router.http.server.state import CLIENT, STATE, AppState
from caravan_router.http.tgi import routes as routes_generate
from caravan_router.http.tgi.schema import GenerateRequest
from caravan_router.http.tgi.validation import candidates_of, validate_generate


class _Keys(msgspec.Struct, frozen=True):
    """Which of the fields that tell the kinds of request apart are there."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_KEYS = msgspec.json.Decoder(_Keys)
_VERTEX = msgspec.json.Decoder(VertexRequest)
_GENERATE = msgspec.json.Decoder(GenerateRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)

# In TGI's order: the first whose field is there.
_HANDLERS: tuple[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], ...] = (
    ("inputs", routes_generate.generate_compat),
    ("messages", routes_chat.chat_completions),
    ("prompt", routes_openai.completions),
)


async def invocations(request: web.Request) -> web.StreamResponse:
    """SageMaker's: with ``inputs`` as ``POST /``, with ``messages`` as chat, else as completions. Errors are TGI's."""
    keys = await read_body(request, _KEYS)
    for field, handler in _HANDLERS:
        if getattr(keys, field) is not msgspec.UNSET:
            # It reads the body again, which the request has kept.
            return await handler(request)
    raise BodyMismatchError("", f"one of {', '.join(f'`{field}`' for field, _ in _HANDLERS)} is needed")


async def vertex(request: web.Request) -> web.Response:
    """Vertex AI's: a text for each instance. All are generated at once."""
    arrived = time.monotonic()
    state, client = request.app[STATE], request[CLIENT]
    instances = _instances(await read_body(request, _VERTEX), state)
    generations = sum(
        1 if isinstance(instance, ChatRequest) else candidates_of(instance.parameters, state.limits)
        for instance in instances
    )
    with admitted(state, client, generations):
        with validating(state.metrics, generations):
            valid = [await _validate(request, instance) for instance in instances]
        with started(state, [one.request for one in valid], arrived) as runs:
            waiting = iter(runs)
            texts = await together([one.text([next(waiting) for _ in one.request.specs]) for one in valid])
    return web.Response(body=msgspec.json.encode(VertexResponse(texts)), content_type="application/json")


@dataclass(frozen=True, slots=True)
class _Prompted:
    body: GenerateRequest
    request: ValidRequest

    async def text(self, runs: list[Run]) -> str:
        candidates = await collect(runs)
        best = best_first(candidates)[0] if len(candidates) > 1 else 0
        return routes_generate.text_of(self.body, candidates[best])


@dataclass(frozen=True, slots=True)
class _Conversation:
    chat: ValidChat

    @property
    def request(self) -> ValidRequest:
        return self.chat.request

    async def text(self, runs: list[Run]) -> str:
        [output] = await routes_chat.read_whole(runs, self.chat)
        message = output.message()
        if message.tool_calls is msgspec.UNSET:
            return message.content or ""
        return msgspec.json.encode(message.tool_calls).decode()


def _instances(body: VertexRequest, state: AppState) -> list[GenerateRequest | ChatRequest]:
    if not body.instances:
        raise EmptyPromptError("instances")
    if len(body.instances) > state.limits.max_client_batch_size:
        raise TooManyPromptsError("instances", state.limits.max_client_batch_size, len(body.instances))
    instances: list[GenerateRequest | ChatRequest] = []
    for index, raw in enumerate(body.instances):
        inside = f"instances[{index}]"
        if decode(raw, _KEYS, inside).messages is msgspec.UNSET:
            instances.append(decode(raw, _GENERATE, inside))
            continue
        chat = decode(raw, _CHAT, inside)
        # A prediction is one text.
        for field, value, neutral in (("stream", chat.stream, {None, False}), ("n", chat.n, {None, 1})):
            if value not in neutral:
                raise UnsupportedFieldError(f"{inside}.{field}", "set it to null", value)
        instances.append(chat)
    return instances


async def _validate(request: web.Request, instance: GenerateRequest | ChatRequest) -> _Prompted | _Conversation:
    state = request.app[STATE]
    serving = serving_of(instance, request.headers, request[CLIENT].key, state.limits)
    if isinstance(instance, ChatRequest):
        return _Conversation(await validate_chat(state, ChatSource(request=instance), serving, 1))
    return _Prompted(instance, await validate_generate(state.engine, state.limits, instance, serving, stream=False))

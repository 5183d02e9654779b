"""The routes for SageMaker (``/invocations``) and Vertex AI (``/vertex``)."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from caravan_router.http.cloud.schema import VertexRequest, VertexResponse
from caravan_router.http.generation.answer import Reply, answer
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.rules import EmptyPromptError, TooManyPromptsError, UnsupportedFieldError
from caravan_router.http.generation.run import Run, together
from caravan_router.http.limits import Limits
from caravan_router.http.openai.chat.reply import ChatReply
from caravan_router.http.openai.chat.routes import chat_completions
from caravan_router.http.openai.chat.schema import ChatCompletion, ChatCompletionChunk, ChatRequest
from caravan_router.http.openai.completions.routes import completions
from caravan_router.http.openai.completions.schema import Completion, CompletionRequest
from caravan_router.http.server.body import decode, read_body
from caravan_router.http.server.errors import BodyMismatchError
from caravan_router.http.server.route import EVENTS, JSON, Route
from caravan_router.http.server.state import STATE
from caravan_router.http.tgi.errors import TGI
from caravan_router.http.tgi.reply import GenerateReply
from caravan_router.http.tgi.routes import GENERATE_ERRORS, generate_compat
from caravan_router.http.tgi.schema import CompatGenerateRequest, GenerateRequest, GenerateResponse, StreamEvent


class _Keys(msgspec.Struct, frozen=True):
    """The fields that distinguish the types of request."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_KEYS = msgspec.json.Decoder(_Keys)
_VERTEX = msgspec.json.Decoder(VertexRequest)
_GENERATE = msgspec.json.Decoder(GenerateRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)

# In TGI's order: the first field that is present decides.
_HANDLERS: tuple[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]], ...] = (
    ("inputs", generate_compat),
    ("messages", chat_completions),
    ("prompt", completions),
)


async def invocations(request: web.Request) -> web.StreamResponse:
    """Handle ``/invocations``: a body of ``POST /``, of chat completions or of completions."""
    keys = await read_body(request, _KEYS)
    for field, handler in _HANDLERS:
        if getattr(keys, field) is not msgspec.UNSET:
            # The handler reads the body again: aiohttp keeps it.
            return await handler(request)
    raise BodyMismatchError("", f"one of {', '.join(f'`{field}`' for field, _ in _HANDLERS)} is needed")


async def vertex(request: web.Request) -> web.StreamResponse:
    """Handle ``/vertex``."""
    body = await read_body(request, _VERTEX)
    return await answer(request, VertexReply(body, request.app[STATE].limits))


class VertexReply(Reply):
    """One text for each instance. All instances are generated at the same time."""

    dialect = TGI

    def __init__(self, body: VertexRequest, limits: Limits) -> None:
        """Raises ValidationError."""
        self._replies = _replies(body, limits)
        self.generations = sum(reply.generations for reply in self._replies)
        self.model = self._replies[0].model

    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        return [request for reply in self._replies for request in await reply.validate(context)]

    async def whole(self, runs: Sequence[Run]) -> bytes:
        texts, start = [], 0
        for reply in self._replies:
            texts.append(reply.text(runs[start : start + reply.generations]))
            start += reply.generations
        predictions = await together(texts)
        if cut := [run.cut for run in runs if run.cut is not None]:
            # A prediction has no field that could say that it is incomplete.
            raise cut[0]
        return msgspec.json.encode(VertexResponse(predictions))


def _replies(body: VertexRequest, limits: Limits) -> list[GenerateReply | ChatReply]:
    """Return the reply to each instance, whose text is its prediction."""
    if not body.instances:
        raise EmptyPromptError("instances")
    if len(body.instances) > limits.max_client_batch_size:
        raise TooManyPromptsError("instances", limits.max_client_batch_size, len(body.instances))
    replies: list[GenerateReply | ChatReply] = []
    for index, raw in enumerate(body.instances):
        inside = f"instances[{index}]"
        if decode(raw, _KEYS, inside).messages is msgspec.UNSET:
            replies.append(GenerateReply(decode(raw, _GENERATE, inside), limits, streamed=False))
            _check_same_model(inside, replies)
            continue
        chat = decode(raw, _CHAT, inside)
        # A prediction is one text.
        for field, value, neutral in (("stream", chat.stream, {None, False}), ("n", chat.n, {None, 1})):
            if value not in neutral:
                raise UnsupportedFieldError(f"{inside}.{field}", "set it to null", value)
        replies.append(ChatReply(chat, limits))
        _check_same_model(inside, replies)
    return replies


def _check_same_model(inside: str, replies: Sequence[GenerateReply | ChatReply]) -> None:
    """Require that the last of ``replies`` is for the model that the first is for."""
    if replies[-1].model != replies[0].model:
        raise UnsupportedFieldError(f"{inside}.model", "let all instances have the same", replies[-1].model)


ROUTES = (
    Route(
        method="POST",
        path="/invocations",
        handler=invocations,
        dialect=TGI,
        summary="For SageMaker: takes a body of `POST /`, of chat completions or of completions",
        body=(CompatGenerateRequest, ChatRequest, CompletionRequest),
        replies=(
            *((JSON, kind) for kind in (list[GenerateResponse], ChatCompletion, Completion)),
            *((EVENTS, kind) for kind in (StreamEvent, ChatCompletionChunk, Completion)),
        ),
        errors=GENERATE_ERRORS,
    ),
    Route(
        method="POST",
        path="/vertex",
        handler=vertex,
        dialect=TGI,
        summary="For Vertex AI: returns one text for each instance",
        body=(VertexRequest,),
        replies=((JSON, VertexResponse),),
        errors=GENERATE_ERRORS,
    ),
)

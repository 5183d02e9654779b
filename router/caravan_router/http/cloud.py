"""The routes for SageMaker (``/invocations``) and Vertex AI (``/vertex``)."""

import msgspec
from aiohttp import web

from caravan_dialects.api.body import decode
from caravan_dialects.api.cloud import AskedVertex, RequestKeys, VertexRequest, VertexResponse
from caravan_dialects.api.errors import BodyMismatchError
from caravan_dialects.api.openai.chat.schema import ChatCompletion, ChatCompletionChunk, ChatRequest
from caravan_dialects.api.openai.completions.schema import Completion, CompletionRequest
from caravan_dialects.api.tgi.errors import TGI
from caravan_dialects.api.tgi.schema import CompatGenerateRequest, GenerateResponse, StreamEvent
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import counting_refusals
from caravan_router.http.openai.generation import chat_completions, completions
from caravan_router.http.server.body import read_json
from caravan_router.http.server.ignored import note_ignored
from caravan_router.http.server.route import EVENTS, JSON, Handler
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag
from caravan_router.http.tgi import GENERATE_ERRORS, generate_compat

# In TGI's order: the first field that is present decides.
_HANDLERS: tuple[tuple[str, Handler], ...] = (
    ("inputs", generate_compat),
    ("messages", chat_completions),
    ("prompt", completions),
)

_KEYS = msgspec.json.Decoder(RequestKeys)

ROUTES = Routes(TGI, tag=Tag.CLOUD)


@ROUTES.route(
    "POST",
    "/invocations",
    "For SageMaker: accepts a body of `POST /`, of chat completions or of completions",
    around=counting_refusals,
    body=(CompatGenerateRequest, ChatRequest, CompletionRequest),
    replies=(
        *((JSON, kind) for kind in (list[GenerateResponse], ChatCompletion, Completion)),
        *((EVENTS, kind) for kind in (StreamEvent, ChatCompletionChunk, Completion)),
    ),
    errors=GENERATE_ERRORS,
)
async def invocations(request: web.Request) -> web.StreamResponse:
    """Handle a body of ``POST /``, of chat completions or of completions."""
    keys = decode(await read_json(request), _KEYS)
    for field, handler in _HANDLERS:
        if getattr(keys, field) is not msgspec.UNSET:
            # The handler reads the body again: aiohttp keeps it.
            return await handler(request)
    raise BodyMismatchError("", f"one of {', '.join(f'`{field}`' for field, _ in _HANDLERS)} is needed")


@ROUTES.route(
    "POST",
    "/vertex",
    "For Vertex AI: returns one text for each instance",
    around=counting_refusals,
    reply=VertexResponse,
    errors=GENERATE_ERRORS,
)
async def vertex(request: web.Request, body: VertexRequest) -> web.StreamResponse:
    asked = AskedVertex(body, request.app[STATE].limits)
    note_ignored(request, asked.ignored)
    return await answer(request, asked)

"""``/v1/completions``."""

import msgspec
from aiohttp import web

from caravan_router.http.generation.answer import answer
from caravan_router.http.openai.completions.reply import CompletionReply
from caravan_router.http.openai.completions.schema import Completion, CompletionRequest
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.server.body import read_body
from caravan_router.http.server.route import EVENTS, GENERATION_ERRORS, JSON, Route
from caravan_router.http.server.state import STATE

_DECODER = msgspec.json.Decoder(CompletionRequest)


async def completions(request: web.Request) -> web.StreamResponse:
    """Handle ``/v1/completions``."""
    body = await read_body(request, _DECODER)
    return await answer(request, CompletionReply(body, request.app[STATE].limits))


ROUTES = (
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        dialect=OPENAI,
        summary="Complete one or several prompts",
        body=(CompletionRequest,),
        replies=((JSON, Completion), (EVENTS, Completion)),
        errors=GENERATION_ERRORS,
    ),
)

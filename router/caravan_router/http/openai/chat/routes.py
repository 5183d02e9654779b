"""``/v1/chat/completions``."""

import msgspec
from aiohttp import web

from caravan_router.http.generation.answer import answer
from caravan_router.http.openai.chat.reply import ChatReply
from caravan_router.http.openai.chat.schema import ChatCompletion, ChatCompletionChunk, ChatRequest
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.server.body import read_body
from caravan_router.http.server.route import EVENTS, GENERATION_ERRORS, JSON, Route
from caravan_router.http.server.state import STATE

_DECODER = msgspec.json.Decoder(ChatRequest)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Handle ``/v1/chat/completions``."""
    body = await read_body(request, _DECODER)
    return await answer(request, ChatReply(body, request.app[STATE].limits))


ROUTES = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        dialect=OPENAI,
        summary="Answer a conversation, with text or with calls of the offered tools",
        body=(ChatRequest,),
        replies=((JSON, ChatCompletion), (EVENTS, ChatCompletionChunk)),
        errors=GENERATION_ERRORS,
    ),
)

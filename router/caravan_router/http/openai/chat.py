"""``/v1/chat/completions``."""

from aiohttp import web

from caravan_router.api.openai.chat.reply import AskedChat
from caravan_router.api.openai.chat.schema import ChatCompletion, ChatCompletionChunk, ChatRequest
from caravan_router.api.openai.errors import OPENAI
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.counting import counting_refusals
from caravan_router.http.server.route import GENERATION_ERRORS
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE

ROUTES = Routes(OPENAI)


@ROUTES.route(
    "POST",
    "/v1/chat/completions",
    "Answer a conversation, with text or with calls of the offered tools",
    around=counting_refusals,
    reply=ChatCompletion,
    events=ChatCompletionChunk,
    errors=GENERATION_ERRORS,
)
async def chat_completions(request: web.Request, body: ChatRequest) -> web.StreamResponse:
    return await answer(request, AskedChat(body, request.app[STATE].limits))

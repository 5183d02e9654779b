"""TGI's ``/chat_tokenize``, which takes the body of OpenAI's chat completions."""

from aiohttp import web

from caravan_dialects.api.generation.prompt import without_media
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.constraints import constraint_of
from caravan_dialects.api.tgi.errors import TGI
from caravan_dialects.api.tgi.schema import ChatTokens
from caravan_router.http.generation.context import context_of
from caravan_router.http.generation.counting import reading_texts
from caravan_router.http.generation.models import asked_model
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS
from caravan_router.http.server.routes import Routes
from caravan_router.http.tgi.routes import tokens_of

ROUTES = Routes(TGI)


@ROUTES.route(
    "POST",
    "/chat_tokenize",
    "Render a conversation with the model's chat template and return the text and its tokens",
    around=reading_texts,
    reply=ChatTokens,
    errors=(*BODY_ERRORS, 404, 422, 429, 503),
)
async def chat_tokenize(request: web.Request, body: ChatRequest) -> web.Response:
    context = await context_of(request, asked_model(request, body.model))
    constrained = constraint_of(body, context.limits) is not None
    prompt = await chat_prompt_of(context, chat_plan_of(context, body, constrained=constrained))
    reply = ChatTokens(await tokens_of(prompt.text, without_media(prompt.tokens)), prompt.text)
    return json_reply(reply)

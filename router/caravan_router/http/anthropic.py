"""``/v1/messages`` and ``/v1/messages/count_tokens``, which Claude Code and others of Anthropic's clients use."""

from aiohttp import web

from caravan_router.api.anthropic.errors import ANTHROPIC
from caravan_router.api.anthropic.reply import AskedMessage
from caravan_router.api.anthropic.schema import AnthropicMessage, CountTokensRequest, Event, MessagesRequest, TokenCount
from caravan_router.api.anthropic.translation import chat_request_of
from caravan_router.api.generation.parts import MediaParts
from caravan_router.api.generation.permits import check_rate
from caravan_router.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.context import context_of
from caravan_router.http.generation.counting import counting_refusals
from caravan_router.http.generation.models import asked_model
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, Parameter
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import CLIENT
from caravan_router.http.server.typed_body import Tolerance

_VERSION = (Parameter(name="anthropic-version", place="header", description="Accepted and without effect"),)

ROUTES = Routes(ANTHROPIC, tolerance=Tolerance.ALWAYS)


@ROUTES.route(
    "POST",
    "/v1/messages",
    "Answer a conversation in Anthropic's form, with text, thoughts or calls of the offered tools",
    around=counting_refusals,
    parameters=_VERSION,
    reply=AnthropicMessage,
    events=Event,
    errors=GENERATION_ERRORS,
)
async def messages(request: web.Request, body: MessagesRequest) -> web.StreamResponse:
    return await answer(request, AskedMessage(body, request[REQUEST_ID]))


@ROUTES.route(
    "POST",
    "/v1/messages/count_tokens",
    "Count the tokens of the prompt that a request for a message has",
    parameters=_VERSION,
    reply=TokenCount,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def count_tokens(request: web.Request, body: CountTokensRequest) -> web.Response:
    check_rate(request[CLIENT])
    context = await context_of(request, asked_model(request, body.model))
    media = MediaParts(context.model.media)
    plan = chat_plan_of(context, chat_request_of(body, context.model, media), constrained=False, media=media)
    prompt = await chat_prompt_of(context, plan)
    reply = TokenCount(len(prompt.tokens.token_ids))
    return json_reply(reply)

"""``/v1/messages`` and ``/v1/messages/count_tokens``, which Claude Code and others of Anthropic's clients use."""

import msgspec
from aiohttp import web

from caravan_router.http.anthropic.errors import ANTHROPIC
from caravan_router.http.anthropic.reply import MessagesReply
from caravan_router.http.anthropic.schema import (
    AnthropicMessage,
    CountTokensRequest,
    Event,
    MessagesRequest,
    TokenCount,
)
from caravan_router.http.anthropic.translation import chat_request_of
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.context import context_of
from caravan_router.http.generation.models import asked_model
from caravan_router.http.generation.permits import check_rate
from caravan_router.http.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.route import BODY_ERRORS, EVENTS, GENERATION_ERRORS, JSON, Parameter, Route
from caravan_router.http.server.state import CLIENT
from caravan_router.http.server.tolerant_body import read_tolerant_body

_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountTokensRequest)


async def messages(request: web.Request) -> web.StreamResponse:
    """Handle ``/v1/messages``."""
    body = await read_tolerant_body(request, _MESSAGES, MessagesRequest)
    return await answer(request, MessagesReply(body, request[REQUEST_ID]))


async def count_tokens(request: web.Request) -> web.Response:
    """Handle ``/v1/messages/count_tokens``."""
    body = await read_tolerant_body(request, _COUNT, CountTokensRequest)
    check_rate(request[CLIENT])
    context = await context_of(request, asked_model(request, body.model))
    plan = chat_plan_of(context, chat_request_of(body, context.model), constrained=False)
    prompt = await chat_prompt_of(context, plan)
    reply = TokenCount(len(prompt.tokens.token_ids))
    return json_reply(reply)


_VERSION = (Parameter(name="anthropic-version", place="header", description="Accepted and without effect"),)

ROUTES = (
    Route(
        method="POST",
        path="/v1/messages",
        handler=messages,
        dialect=ANTHROPIC,
        summary="Answer a conversation in Anthropic's form, with text, thoughts or calls of the offered tools",
        parameters=_VERSION,
        body=(MessagesRequest,),
        replies=((JSON, AnthropicMessage), (EVENTS, Event)),
        errors=GENERATION_ERRORS,
    ),
    Route(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        dialect=ANTHROPIC,
        summary="Count the tokens of the prompt that a request for a message has",
        parameters=_VERSION,
        body=(CountTokensRequest,),
        replies=((JSON, TokenCount),),
        errors=(*BODY_ERRORS, 404, 429, 503),
    ),
)

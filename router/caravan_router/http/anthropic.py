"""``/v1/messages`` and ``/v1/messages/count_tokens``, which Claude Code and others of Anthropic's clients use."""

import msgspec
from aiohttp import web

from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.anthropic.reply import AskedMessage
from caravan_dialects.api.anthropic.schema import (
    AnthropicMessage,
    CountedEdits,
    CountTokensRequest,
    Event,
    MessagesRequest,
    TokenCount,
)
from caravan_dialects.api.anthropic.translation import chat_request_of
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.prompt import RenderedTokens, rendered_tokens
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_router.http.generation.answer import REMEMBERED, answer
from caravan_router.http.generation.models import asked_model, context_of, counting_refusals, reading_texts
from caravan_router.http.server.body import Tolerance
from caravan_router.http.server.ignored import IGNORED
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.tags import Tag

_VERSION = (Parameter(name="anthropic-version", place="header", description="Accepted and without effect"),)

_PATH = "/v1/messages"

ROUTES = Routes(ANTHROPIC, tolerance=Tolerance.ALWAYS, tag=Tag.ANTHROPIC)


@ROUTES.route(
    "POST",
    _PATH,
    "Answer a conversation in Anthropic's form, with text, reasoning or tool calls",
    around=counting_refusals,
    parameters=_VERSION,
    reply=AnthropicMessage,
    events=Event,
    errors=(*GENERATION_ERRORS, 402),
)
async def messages(request: web.Request, body: MessagesRequest) -> web.StreamResponse:
    asked = AskedMessage(body, request[REQUEST_ID], request.app[REMEMBERED])
    for kind in asked.skipped_tools:
        request.app[IGNORED].note(f"tools of {_PATH}", kind)
    return await answer(request, asked)


@ROUTES.route(
    "POST",
    "/v1/messages/count_tokens",
    "Count the prompt tokens of a message request",
    around=reading_texts,
    parameters=_VERSION,
    reply=TokenCount,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def count_tokens(request: web.Request, body: CountTokensRequest) -> web.Response:
    _, prompt = await _prompt(request, body)
    tokens = len(prompt)
    return json_reply(TokenCount(tokens, msgspec.UNSET if body.context_management is None else CountedEdits(tokens)))


@ROUTES.route(
    "POST",
    "/v1/messages/render",
    "Return the prompt tokens of a message request, as in vLLM",
    around=reading_texts,
    parameters=_VERSION,
    reply=RenderedTokens,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def render_message(request: web.Request, body: CountTokensRequest) -> web.Response:
    model, prompt = await _prompt(request, body)
    return json_reply(rendered_tokens(model, prompt))


async def _prompt(request: web.Request, body: CountTokensRequest) -> tuple[str, tuple[int, ...]]:
    """Return the model's name and the tokens of the prompt. Raises RequestError, EngineError."""
    context = await context_of(request, asked_model(request, body.model))
    media = MediaParts(context.model.media)
    plan = chat_plan_of(context, chat_request_of(body, context.model, media), constrained=False, media=media)
    return context.model.name, (await chat_prompt_of(context, plan)).tokens.token_ids

"""Google's Gemini API, which the ``google-genai`` packages and Gemini CLI use.

Packages ask under ``/v1`` since version 3, under ``/v1beta`` before.
"""

from functools import partial

from aiohttp import web

from caravan_dialects.api.gemini.contents import embeddings_of, texts_of
from caravan_dialects.api.gemini.errors import GEMINI
from caravan_dialects.api.gemini.reply import AskedContent, AskedList
from caravan_dialects.api.gemini.schema import (
    BatchEmbedContentsRequest,
    BatchEmbedContentsResponse,
    ContentEmbedding,
    CountTokensBody,
    CountTokensResponse,
    EmbedContentRequest,
    EmbedContentResponse,
    GenerateContentRequest,
    GenerateContentResponse,
)
from caravan_dialects.api.gemini.translation import counted_request, prompt_request_of
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import context_of, counting_refusals, reading_texts
from caravan_router.http.openai.vectors import vectors_of
from caravan_router.http.server.body import Tolerance
from caravan_router.http.server.route import BODY_ERRORS, EVENTS, GENERATION_ERRORS, JSON, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag

_KEY = Parameter(name="key", place="query", description="An API key, for clients that do not send `x-goog-api-key`")
_MODEL = Parameter(name="model", place="path", description="Name of a model or of one of its adapters")
_ALT = Parameter(name="alt", place="query", description='"sse" for events; by default, the chunks are a JSON list')
_TEXT_ERRORS = (*BODY_ERRORS, 404, 429, 503)
_VECTOR_ERRORS = (*BODY_ERRORS, 404, 424, 429, 503)

ROUTES = Routes(GEMINI, tolerance=Tolerance.ALWAYS, slashes=True, parameters=(_MODEL, _KEY), tag=Tag.GEMINI)


@ROUTES.route(
    "POST",
    "/v1beta/models/{model}:generateContent",
    "Answer a conversation in Gemini's form, with text, reasoning or function calls",
    around=counting_refusals,
    reply=GenerateContentResponse,
    errors=GENERATION_ERRORS,
)
async def generate_content(request: web.Request, body: GenerateContentRequest) -> web.StreamResponse:
    return await answer(request, AskedContent(_model_of(request), body, request.app[STATE].limits))


ROUTES.also("/v1/models/{model}:generateContent", "v1")


@ROUTES.route(
    "POST",
    "/v1beta/models/{model}:streamGenerateContent",
    "Answer a conversation in Gemini's form, in chunks",
    around=counting_refusals,
    parameters=(_MODEL, _KEY, _ALT),
    replies=((JSON, list[GenerateContentResponse]), (EVENTS, GenerateContentResponse)),
    errors=GENERATION_ERRORS,
)
async def stream_generate_content(request: web.Request, body: GenerateContentRequest) -> web.StreamResponse:
    alt = request.query.get("alt", "json")
    if alt not in {"json", "sse"}:
        raise unsupported_field_error("alt", 'set it to "sse" or "json"', alt)
    kind = AskedContent if alt == "sse" else AskedList
    return await answer(request, kind(_model_of(request), body, request.app[STATE].limits, streamed=True))


ROUTES.also("/v1/models/{model}:streamGenerateContent", "v1")


@ROUTES.route(
    "POST",
    "/v1beta/models/{model}:countTokens",
    "Count the prompt tokens of a conversation in Gemini's form",
    around=reading_texts,
    reply=CountTokensResponse,
    errors=_TEXT_ERRORS,
)
async def count_content_tokens(request: web.Request, body: CountTokensBody) -> web.Response:
    context = await context_of(request, _model_of(request))
    media = MediaParts(context.model.media)
    chat = prompt_request_of(counted_request(body), context.model, media)
    plan = chat_plan_of(context, chat, constrained=False, media=media)
    return json_reply(CountTokensResponse(len((await chat_prompt_of(context, plan, "contents")).tokens.token_ids)))


ROUTES.also("/v1/models/{model}:countTokens", "v1")


@ROUTES.route(
    "POST",
    "/v1beta/models/{model}:embedContent",
    "Return the vector of a text in Gemini's form",
    reply=EmbedContentResponse,
    errors=_VECTOR_ERRORS,
)
async def embed_content(request: web.Request, body: EmbedContentRequest) -> web.Response:
    [embedding] = await _embeddings(request, [body], within="")
    return json_reply(EmbedContentResponse(embedding))


ROUTES.also("/v1/models/{model}:embedContent", "v1")


@ROUTES.route(
    "POST",
    "/v1beta/models/{model}:batchEmbedContents",
    "Return one vector for each text in Gemini's form",
    reply=BatchEmbedContentsResponse,
    errors=_VECTOR_ERRORS,
)
async def batch_embed_contents(request: web.Request, body: BatchEmbedContentsRequest) -> web.Response:
    return json_reply(BatchEmbedContentsResponse(await _embeddings(request, body.requests, within="requests")))


ROUTES.also("/v1/models/{model}:batchEmbedContents", "v1")


async def _embeddings(
    request: web.Request, requests: list[EmbedContentRequest], *, within: str
) -> list[ContentEmbedding]:
    made = await vectors_of(request, _model_of(request), partial(texts_of, requests, within=within))
    return embeddings_of(requests, made)


def _model_of(request: web.Request) -> str:
    return request.match_info["model"]

"""TGI's routes: ``/generate``, ``/generate_stream``, ``/`` (which is either), ``/tokenize`` and ``/info``.

``/detokenize``, which TGI lacks, stands beside ``/tokenize`` and has its form of errors.
"""

import asyncio

from aiohttp import web

from caravan_dialects.api.generation.context import MODEL_HEADER
from caravan_dialects.api.generation.prompt import check_token_ids, tokenize_prompt, without_media
from caravan_dialects.api.limits import bounds_of
from caravan_dialects.api.openai.chat.plan import chat_plan_of, chat_prompt_of
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.constraints import constraint_of
from caravan_dialects.api.tgi.errors import TGI
from caravan_dialects.api.tgi.reply import AskedGenerate
from caravan_dialects.api.tgi.schema import (
    ChatTokens,
    CompatGenerateRequest,
    DetokenizedText,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    Info,
    StreamEvent,
    TokenizedToken,
    TokenizeRequest,
)
from caravan_dialects.api.tgi.validation import MAX_STOPS
from caravan_dialects.text.detokenize import token_spans
from caravan_proto.messages.model import TokenizedText
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import (
    asked_model,
    context_of,
    counting_refusals,
    listed_models,
    reading_texts,
    served_model,
)
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag

GENERATE_ERRORS = (*GENERATION_ERRORS, 422)


ROUTES = Routes(TGI, tag=Tag.TGI)


@ROUTES.route(
    "POST",
    "/generate",
    "Generate text and return it whole",
    around=counting_refusals,
    reply=GenerateResponse,
    errors=GENERATE_ERRORS,
)
async def generate(request: web.Request, body: GenerateRequest) -> web.StreamResponse:
    return await answer(request, AskedGenerate(body, request.app[STATE].limits, streamed=False))


@ROUTES.route(
    "POST",
    "/generate_stream",
    "Generate text and stream one event per token",
    around=counting_refusals,
    events=StreamEvent,
    errors=GENERATE_ERRORS,
)
async def generate_stream(request: web.Request, body: GenerateRequest) -> web.StreamResponse:
    return await answer(request, AskedGenerate(body, request.app[STATE].limits, streamed=True))


@ROUTES.route(
    "POST",
    "/",
    "Generate text; stream it if `stream` is true, else return an array of one reply",
    around=counting_refusals,
    reply=list[GenerateResponse],
    events=StreamEvent,
    errors=GENERATE_ERRORS,
)
async def generate_compat(request: web.Request, body: CompatGenerateRequest) -> web.StreamResponse:
    """The field ``stream`` chooses the form of the reply; a whole reply is an array of one.

    TGI echoes the prompt here unless told otherwise. Caravan does not: ``return_full_text`` is false by default, as on
    the other routes. TGI's own client always sends the field, and huggingface_hub documents false while not sending it.
    """
    limits = request.app[STATE].limits
    return await answer(request, AskedGenerate(body, limits, streamed=bool(body.stream), as_list=True))


@ROUTES.route(
    "POST",
    "/tokenize",
    "Split a text into tokens and return their ids and positions in the text",
    around=reading_texts,
    reply=list[TokenizedToken],
    errors=(*BODY_ERRORS, 404, 422, 429, 503),
)
async def tokenize(request: web.Request, body: TokenizeRequest) -> web.Response:
    state = request.app[STATE]
    engine = served_model(state, asked_model(request, body.model)).engine
    bounds = bounds_of(state.limits, engine.model)
    add_special = body.add_special_tokens is not False
    tokenized = await tokenize_prompt(engine, "inputs", body.inputs, bounds, add_special=add_special)
    return json_reply(await tokens_of(body.inputs, tokenized))


async def tokens_of(text: str, tokenized: TokenizedText) -> list[TokenizedToken]:
    """Return the tokens of ``text`` with their places in it."""
    # In a thread, since long texts take long and streams must not wait.
    spans = await asyncio.to_thread(token_spans, text, tokenized)
    return [TokenizedToken(span.token_id, span.text, span.start, span.stop) for span in spans]


@ROUTES.route(
    "POST",
    "/detokenize",
    "Return the text of tokens",
    around=reading_texts,
    reply=DetokenizedText,
    errors=(*BODY_ERRORS, 404, 422, 424, 429, 503),
)
async def detokenize(request: web.Request, body: DetokenizeRequest) -> web.Response:
    state = request.app[STATE]
    engine = served_model(state, asked_model(request, body.model)).engine
    model = engine.model
    limit = bounds_of(state.limits, model).max_prompt_bytes
    pieces: tuple[bytes, ...] = ()
    if body.tokens:
        check_token_ids("tokens", body.tokens, limit, model)
        pieces = (await engine.queries.detokenize(body.tokens)).pieces
    text = b"".join(pieces).decode(errors="replace")
    return json_reply(DetokenizedText(text, text))


@ROUTES.route(
    "GET",
    "/info",
    "Describe a model, the limits and the router",
    parameters=(Parameter(name=MODEL_HEADER, place="header", description="The model; left out: the default"),),
    reply=Info,
    errors=(404, 503),
)
async def info(request: web.Request) -> web.Response:
    state = request.app[STATE]
    model = served_model(state, asked_model(request, None)).engine.model
    bounds = bounds_of(state.limits, model)
    reply = Info(
        model_id=model.name,
        model_sha=model.sha256 or None,
        model_pipeline_tag="text-generation" if model.generates else "feature-extraction",
        max_concurrent_requests=state.limits.max_concurrent_requests,
        max_best_of=state.limits.max_best_of,
        max_stop_sequences=MAX_STOPS if state.limits.max_stop_sequences is None else state.limits.max_stop_sequences,
        max_input_tokens=bounds.max_input_tokens,
        max_total_tokens=bounds.max_total_tokens,
        validation_workers=1,
        max_client_batch_size=state.limits.max_client_batch_size,
        router="text-generation-router",
        version=state.info.version,
        sha=None,
        docker_label=None,
        server="caravan-router",
        waiting_served_ratio=state.info.waiting_served_ratio,
        max_waiting_tokens=state.info.max_waiting_tokens,
        max_batch_prefill_tokens=state.info.max_batch_prefill_tokens,
        max_batch_total_tokens=model.total_cells,
        max_batch_size=state.info.max_batch_size,
        models=[each.name for each in listed_models(state)],
        draft_model=model.draft_model or None,
        request_defaults=dict(model.request_defaults),
        max_loras=model.max_adapters,
        loaded_loras=model.held_adapters,
    )
    return json_reply(reply)


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

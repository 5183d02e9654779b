"""Ollama's routes, which many desktop tools use."""

import time
from dataclasses import replace
from functools import partial

import msgspec
from aiohttp import web

from caravan_dialects.api.generation.context import model_name
from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.errors import OLLAMA
from caravan_dialects.api.ollama.recipe import NO_RECIPE, Recipe, chat_with, generation_with, options_with, recipe_of
from caravan_dialects.api.ollama.reply import NANOSECONDS, NOTHING, AskedOllama, Shape, chat_reply, generate_reply
from caravan_dialects.api.ollama.validation import (
    bare_name,
    seconds_of,
    source_of_chat,
    source_of_generate,
    texts_of_embed,
    texts_of_embeddings,
)
from caravan_dialects.api.openai.embeddings import shortened
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import asked_model, awaited_model, counting_refusals
from caravan_router.http.openai.vectors import vectors_of
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, JSON, LINES, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import ARRIVED, STATE
from caravan_router.http.server.tags import Tag

ROUTES = Routes(OLLAMA, any_type=True, tag=Tag.OLLAMA)
# The first one with the routes of Anthropic's API, which is the newest part that is here too. Clients refuse servers
# whose version is too low: VS Code those below 0.6.4.
COMPATIBLE_VERSION = "0.14.0"
_EMBEDDING_ERRORS = (*BODY_ERRORS, 404, 424, 429, 503)


def keep_model(request: web.Request, model: str | None, keep_alive: str | float | None) -> None:
    """Let the model stay as long as the request says, if it is of the catalogue.

    Raises ValidationError, UnknownModelError.
    """
    seconds, state = seconds_of(keep_alive), request.app[STATE]
    if seconds is not None and state.catalogue is not None:
        name = model_name(state.fleet, asked_model(request, bare_name(model)))
        if state.catalogue.find(name) is not None:
            state.catalogue.keep(name, seconds)


def recipe_for(request: web.Request, model: str | None) -> Recipe:
    """Return the recipe of the model that a request asks for; one that says nothing, if it was not made of another."""
    catalogue = request.app[STATE].catalogue
    made = None if catalogue is None else catalogue.made(asked_model(request, bare_name(model)))
    return NO_RECIPE if made is None else recipe_of(made.recipe)


@ROUTES.route(
    "POST", "/api/embed", "Return one embedding for each text", reply=ollama.OllamaEmbedReply, errors=_EMBEDDING_ERRORS
)
async def ollama_embed(request: web.Request, body: ollama.OllamaEmbedRequest) -> web.Response:
    keep_model(request, body.model, body.keep_alive)
    options = options_with(recipe_for(request, body.model).parameters, body.options)
    meant = msgspec.structs.replace(body, options=options)
    made = await vectors_of(request, bare_name(body.model), partial(texts_of_embed, meant))
    reply = ollama.OllamaEmbedReply(
        model=made.model,
        embeddings=[shortened(vector, body.dimensions) for vector in made.vectors],
        total_duration=int((time.monotonic() - request[ARRIVED]) * NANOSECONDS),
        load_duration=0,
        prompt_eval_count=made.tokens,
    )
    return json_reply(reply)


@ROUTES.route(
    "POST",
    "/api/embeddings",
    "Return the embedding of one text",
    reply=ollama.OllamaEmbeddingsReply,
    errors=_EMBEDDING_ERRORS,
)
async def ollama_embeddings(request: web.Request, body: ollama.OllamaEmbeddingsRequest) -> web.Response:
    keep_model(request, body.model, body.keep_alive)
    options = options_with(recipe_for(request, body.model).parameters, body.options)
    meant = msgspec.structs.replace(body, options=options)
    made = await vectors_of(request, bare_name(body.model), partial(texts_of_embeddings, meant))
    reply = ollama.OllamaEmbeddingsReply([number for vector in made.vectors for number in vector])
    return json_reply(reply)


@ROUTES.route(
    "POST",
    "/api/generate",
    "Generate text for a prompt; streams lines of JSON unless `stream` is false",
    around=counting_refusals,
    replies=((JSON, ollama.OllamaGenerateReply), (LINES, ollama.OllamaGenerateReply)),
    errors=GENERATION_ERRORS,
)
async def ollama_generate(request: web.Request, body: ollama.OllamaGenerateRequest) -> web.StreamResponse:
    keep_model(request, body.model, body.keep_alive)
    if not (body.prompt or body.suffix):
        return await _load(request, body, generate_reply)
    meant = generation_with(recipe_for(request, body.model), body)
    return await answer(request, AskedOllama(body, lambda context: source_of_generate(meant, context), generate_reply))


@ROUTES.route(
    "POST",
    "/api/chat",
    "Answer a conversation; streams lines of JSON unless `stream` is false",
    around=counting_refusals,
    replies=((JSON, ollama.OllamaChatReply), (LINES, ollama.OllamaChatReply)),
    errors=GENERATION_ERRORS,
)
async def ollama_chat(request: web.Request, body: ollama.OllamaChatRequest) -> web.StreamResponse:
    keep_model(request, body.model, body.keep_alive)
    if not body.messages:
        return await _load(request, body, chat_reply)
    meant = chat_with(recipe_for(request, body.model), body)
    return await answer(request, AskedOllama(body, lambda context: source_of_chat(meant, context), chat_reply))


async def _load(request: web.Request, body: ollama.OllamaFields, shape: Shape) -> web.Response:
    """Answer a request that only loads the model, or has it unloaded when nothing runs on it.

    A model that is not of the catalogue stays loaded.
    """
    state = request.app[STATE]
    unloads = seconds_of(body.keep_alive) == 0
    asked = asked_model(request, bare_name(body.model))
    name = model_name(state.fleet, asked)
    if state.catalogue is not None and not unloads and state.catalogue.find(name) is not None:
        await state.catalogue.wait_until_loaded(name)
    name = name if unloads else (await awaited_model(state, asked)).engine.model.name
    reply = shape(name, NOTHING)
    reply.done = True
    reply.done_reason = "unload" if unloads else "load"
    return json_reply(reply)


@ROUTES.route("GET", "/api/version", "Return the version of Ollama whose API this is", reply=ollama.OllamaVersion)
async def ollama_version(_request: web.Request) -> web.Response:
    return json_reply(ollama.OllamaVersion(COMPATIBLE_VERSION))


ROUTES.append(replace(ROUTES[-1], method="HEAD", replies=(), alias="head"))

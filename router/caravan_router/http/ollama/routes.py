"""Ollama's routes, which many desktop tools use."""

from dataclasses import replace

from aiohttp import web

from caravan_dialects.api.generation.models import model_name
from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.errors import OLLAMA
from caravan_dialects.api.ollama.keep_alive import seconds_of
from caravan_dialects.api.ollama.recipe import chat_with, generation_with
from caravan_dialects.api.ollama.reply import NOTHING, AskedOllama, Shape, chat_reply, generate_reply
from caravan_dialects.api.ollama.validation import bare_name, source_of_chat, source_of_generate
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.counting import counting_refusals
from caravan_router.http.generation.models import asked_model, awaited_model
from caravan_router.http.ollama.keeping import keep_model
from caravan_router.http.ollama.recipes import recipe_for
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import GENERATION_ERRORS, JSON, LINES
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE

ROUTES = Routes(OLLAMA, any_type=True)


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


@ROUTES.route("GET", "/api/version", "Return Caravan's version", reply=ollama.OllamaVersion)
async def ollama_version(request: web.Request) -> web.Response:
    return json_reply(ollama.OllamaVersion(request.app[STATE].info.version))


ROUTES.append(replace(ROUTES[-1], method="HEAD", replies=(), alias="head"))

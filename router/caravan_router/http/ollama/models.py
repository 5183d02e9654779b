"""Ollama's routes that describe the models: ``/api/tags``, ``/api/ps`` and ``/api/show``."""

import time
from dataclasses import replace

from aiohttp import web

from caravan_dialects.api.generation.context import model_name
from caravan_dialects.api.ollama.errors import OLLAMA, catalogue_errors
from caravan_dialects.api.ollama.models import described, described_cold, described_made, loaded, tags_of, tags_of_made
from caravan_dialects.api.ollama.schema import OllamaRunningList, OllamaShowReply, OllamaShowRequest, OllamaTagList
from caravan_dialects.api.ollama.validation import bare_name
from caravan_router.http.generation.models import asked_model, awaited_model, catalogue_models, listed_models
from caravan_router.http.server.route import BODY_ERRORS, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE, AppState
from caravan_router.http.server.tags import Tag

ROUTES = Routes(OLLAMA, any_type=True, tag=Tag.OLLAMA)


@ROUTES.route("GET", "/api/tags", "List the models and their adapters", reply=OllamaTagList, errors=(503,))
async def ollama_tags(request: web.Request) -> web.Response:
    state = request.app[STATE]
    catalogue = state.catalogue
    if catalogue is None:
        return json_reply(tags_of(listed_models(state), {}))
    await catalogue.survey()
    tags = tags_of(listed_models(state), catalogue_models(state))
    return json_reply(OllamaTagList([*tags.models, *tags_of_made(catalogue.all_made(), tags)]))


# Ollama's clients ask so whether a server is up.
ROUTES.append(replace(ROUTES[-1], method="HEAD", replies=(), alias="head"))


@ROUTES.route("GET", "/api/ps", "List the loaded models and their adapters", reply=OllamaRunningList, errors=(503,))
async def ollama_ps(request: web.Request) -> web.Response:
    state = request.app[STATE]
    return json_reply(loaded(listed_models(state), catalogue_models(state), time.time()))


@ROUTES.route(
    "POST",
    "/api/show",
    "Describe a model; one that is not loaded is described from its files and stays unloaded",
    reply=OllamaShowReply,
    errors=(*BODY_ERRORS, 404, 503),
)
async def ollama_show(request: web.Request, body: OllamaShowRequest) -> web.Response:
    """Raises UnknownModelError, NoShardError, CatalogueRefusalError."""
    catalogue, name = request.app[STATE].catalogue, bare_name(body.model or body.name)
    asked = asked_model(request, name)
    shown = await _shown(request.app[STATE], name, asked)
    made = None if catalogue is None else catalogue.made(asked)
    return json_reply(shown if made is None else described_made(made, shown))


async def _shown(state: AppState, name: str, asked: str) -> OllamaShowReply:
    """Describe a model of which there are files, or an adapter."""
    meant = model_name(state.fleet, asked)
    if state.catalogue is not None and state.fleet.engine(meant) is None and state.catalogue.find(meant) is not None:
        with catalogue_errors():
            return described_cold(await state.catalogue.describe(meant))
    served = await awaited_model(state, asked)
    return described(name, served.engine.model)

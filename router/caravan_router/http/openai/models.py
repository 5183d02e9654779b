"""The models that are served, as OpenAI's ``/v1/models`` lists them, and llama-server's ``/models``."""

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import UnknownModelError
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.schema import Architecture, Model, ModelDownload, ModelList, ModelStatus
from caravan_router.http.generation.models import catalogue_models, listed_models
from caravan_router.http.server.route import json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE, AppState
from caravan_router.http.server.tags import Tag
from caravan_scheduler.core.catalogue import CatalogueModel, Download, ModelState
from caravan_scheduler.core.engine import ModelFacts

SUMMARY = "List the models and adapters, the default model first, including those that are loaded on demand"

ROUTES = Routes(OPENAI, tag=Tag.OPENAI)


@ROUTES.route("GET", "/models", SUMMARY, reply=ModelList, errors=(503,), alias="llama_server")
async def models(request: web.Request) -> web.Response:
    return json_reply(ModelList("list", listed(request.app[STATE])))


def found(state: AppState, asked: str) -> Model:
    """Return the model or adapter that ``asked`` means. Raises UnknownModelError, NoShardError."""
    name = state.fleet.names.meant(asked)
    for entry in listed(state):
        if entry.id == name or (entry.aliases is not msgspec.UNSET and asked in entry.aliases):
            return entry
    raise UnknownModelError(asked)


def listed(state: AppState) -> list[Model]:
    """Return the models and their adapters, the default model first. Raises NoShardError."""
    known = {facts.name: facts for facts in listed_models(state)}
    catalogue = catalogue_models(state)
    listed = []
    for name in dict.fromkeys((*catalogue, *known)):
        entry = _entry(state, name, catalogue.get(name))
        if (facts := known.get(name)) is None:
            listed.append(entry)
            continue
        reads, created = _architecture(facts), facts.modified_s or state.started_s
        if facts.aliases:
            known_aliases = () if entry.aliases is msgspec.UNSET else entry.aliases
            entry = msgspec.structs.replace(entry, aliases=(*known_aliases, *facts.aliases))
        listed += [
            msgspec.structs.replace(one, architecture=reads, created=created)
            for one in (entry, *_adapters(state, facts))
        ]
    arriving = () if state.catalogue is None else state.catalogue.arriving()
    return listed + [_entry(state, model.name, model) for model in arriving]


def _entry(state: AppState, name: str, model: CatalogueModel | None) -> Model:
    entry = Model(name, "model", state.started_s, name, name, None)
    if model is None:
        return entry
    status = ModelStatus(
        model.state.value, failed=model.state is ModelState.FAILED, download=download_told(model.download)
    )
    return msgspec.structs.replace(entry, status=status, aliases=model.aliases)


def download_told(download: Download | None) -> ModelDownload | None:
    """Return how far a download is as clients are told."""
    return None if download is None else ModelDownload(download.done, download.size)


def _architecture(facts: ModelFacts) -> Architecture | msgspec.UnsetType:
    if facts.media is None:
        return msgspec.UNSET
    reads = [name for name, read in (("image", facts.media.images), ("audio", facts.media.audio)) if read]
    return Architecture(["text", *reads], ["text"])


def _adapters(state: AppState, facts: ModelFacts) -> list[Model]:
    return [Model(adapter, "model", state.started_s, facts.name, adapter, facts.name) for adapter in facts.adapters]

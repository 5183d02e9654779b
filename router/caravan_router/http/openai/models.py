"""``/v1/models``, and llama-server's ``/models``."""

from dataclasses import replace

import msgspec
from aiohttp import web

from caravan_router.api.errors import UnknownModelError
from caravan_router.api.openai.errors import OPENAI
from caravan_router.api.openai.schema import Architecture, Model, ModelDownload, ModelList, ModelStatus
from caravan_router.core.engine import ModelFacts
from caravan_router.core.library import Download, LibraryModel, ModelState
from caravan_router.http.generation.models import library_models, listed_models
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import Parameter
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE, AppState

ROUTES = Routes(OPENAI)


@ROUTES.route(
    "GET",
    "/v1/models",
    "List the models and their adapters, the default model first; also those that are loaded when a request asks",
    reply=ModelList,
    errors=(503,),
)
async def models(request: web.Request) -> web.Response:
    return json_reply(ModelList("list", _listed(request.app[STATE])))


ROUTES.append(replace(ROUTES[-1], path="/models", alias="llama_server"))
ROUTES.append(replace(ROUTES[-2], method="HEAD", replies=(), alias="head"))


@ROUTES.route(
    "GET",
    "/v1/models/{model}",
    "Return a model or an adapter",
    parameters=(Parameter(name="model", place="path", description="Name of the model or adapter"),),
    reply=Model,
    errors=(404, 503),
)
async def model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    asked = request.match_info["model"]
    name = state.fleet.names.meant(asked)
    for entry in _listed(state):
        if entry.id == name:
            return json_reply(entry)
    raise UnknownModelError(asked)


def _listed(state: AppState) -> list[Model]:
    known = {facts.name: facts for facts in listed_models(state)}
    library = library_models(state)
    listed = []
    for name in dict.fromkeys((*library, *known)):
        entry = _entry(name, library.get(name))
        if (facts := known.get(name)) is None:
            listed.append(entry)
            continue
        reads = _architecture(facts)
        listed += [msgspec.structs.replace(one, architecture=reads) for one in (entry, *_adapters(facts))]
    arriving = () if state.library is None else state.library.arriving()
    return listed + [_entry(model.name, model) for model in arriving]


def _entry(name: str, model: LibraryModel | None) -> Model:
    entry = Model(name, "model", 0, name, name, None)
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


def _adapters(facts: ModelFacts) -> list[Model]:
    return [Model(adapter, "model", 0, facts.name, adapter, facts.name) for adapter in facts.adapters]

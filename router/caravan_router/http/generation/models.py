"""Finds the model that a request is for."""

from aiohttp import web

from caravan_dialects.api.errors import NoCatalogueError, UnknownModelError
from caravan_dialects.api.generation.models import MODEL_HEADER, ServedModel, model_name
from caravan_router.http.server.state import AppState
from caravan_router.metrics.recorder import ModelMetrics
from caravan_scheduler.core.catalogue import Catalogue, CatalogueModel
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.errors import NoShardError


def header_model(request: web.Request) -> str:
    """Return the name of the model in the header of a request, "" if it has none."""
    return request.headers.get(MODEL_HEADER) or ""


def asked_model(request: web.Request, field: str | None) -> str:
    """Return the name in the body's field, else that in the header; "" if the request names no model."""
    return field or header_model(request)


def metrics_of(state: AppState, asked: str) -> ModelMetrics:
    """Return the metrics of the model that ``asked`` means, or of all requests whose model is not known."""
    try:
        return state.metrics.of(model_name(state.fleet, asked))
    except UnknownModelError:
        return state.metrics.of("")


def served_model(state: AppState, asked: str) -> ServedModel:
    """Return the model that ``asked`` means.

    Raises UnknownModelError, and NoShardError if no shard of it has joined or all have left.
    """
    name = model_name(state.fleet, asked)
    engine = state.fleet.engine(name)
    if engine is None:
        raise NoShardError(f"no shard of {name} is up" if name else "no shard has joined yet", model=name)
    return ServedModel(engine, state.metrics.of(engine.model.name))


async def awaited_model(state: AppState, asked: str) -> ServedModel:
    """Return the model that ``asked`` means; wait for its first shard if none has joined yet.

    Raises UnknownModelError, NoShardError.
    """
    name = model_name(state.fleet, asked)
    if state.fleet.engine(name) is None:
        await state.fleet.wait_for_model(name)
    return served_model(state, asked)


def listed_models(state: AppState) -> list[ModelFacts]:
    """Return all known models, the default first. Raises NoShardError if neither shards nor a catalogue have any."""
    served = [engine.model for engine in state.fleet.engines]
    if not served and state.catalogue is None:
        raise NoShardError("no shard has joined yet")
    return served


def catalogue_of(state: AppState) -> Catalogue:
    """Return the catalogue. Raises NoCatalogueError if the server has none."""
    if state.catalogue is None:
        raise NoCatalogueError
    return state.catalogue


def catalogue_models(state: AppState) -> dict[str, CatalogueModel]:
    """Return the models of the catalogue by name, the default first; none if there is no catalogue."""
    return {} if state.catalogue is None else {model.name: model for model in state.catalogue.models()}

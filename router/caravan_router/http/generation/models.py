"""Finds the model that a request is for."""

from aiohttp import web

from caravan_dialects.api.errors import NoLibraryError, UnknownModelError
from caravan_dialects.api.generation.context import MODEL_HEADER, ServedModel, model_name
from caravan_router.http.server.state import AppState
from caravan_router.metrics.recorder import ModelMetrics
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.errors import NoShardError
from caravan_scheduler.core.library import Library, LibraryModel


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
    """Return all known models, the default first. Raises NoShardError if there is none yet, nor any in the library."""
    served = [engine.model for engine in state.fleet.engines]
    if not served and state.library is None:
        raise NoShardError("no shard has joined yet")
    return served


def library_of(state: AppState) -> Library:
    """Return the library. Raises NoLibraryError if the server has none."""
    if state.library is None:
        raise NoLibraryError
    return state.library


def library_models(state: AppState) -> dict[str, LibraryModel]:
    """Return the models of the library by name, the default first; none if there is no library."""
    return {} if state.library is None else {model.name: model for model in state.library.models()}

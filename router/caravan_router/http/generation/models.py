"""Finds the model that a request is for."""

from dataclasses import dataclass

from aiohttp import web

from caravan_router.core.engine import Engine, Fleet, ModelFacts
from caravan_router.core.errors import NoShardError
from caravan_router.http.server.errors import UnknownModelError
from caravan_router.http.server.state import AppState
from caravan_router.metrics.recorder import ModelMetrics

MODEL_HEADER = "X-Model"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the metrics of its requests."""

    engine: Engine
    metrics: ModelMetrics


def asked_model(request: web.Request, field: str | None) -> str:
    """Return the name in the body's field, else that in the header; "" if the request names no model."""
    return field or request.headers.get(MODEL_HEADER) or ""


def model_name(fleet: Fleet, asked: str) -> str:
    """Return the name of the model that ``asked`` means, itself or by one of its adapters; "" means the default.

    If the fleet is not strict, its one model answers to every name. Returns "" for the default while that is not known
    yet. Raises UnknownModelError.
    """
    engines, expected = fleet.engines, fleet.expected
    names = [engine.model.name for engine in engines]
    if asked in names or asked in expected:
        return asked
    for engine in engines:
        if asked in engine.model.adapters:
            return engine.model.name
    if asked and fleet.strict:
        raise UnknownModelError(asked)
    return (*expected, *names, "")[0]


def metrics_of(state: AppState, asked: str) -> ModelMetrics:
    """Return the metrics of the model that ``asked`` means, or of all requests whose model is not known."""
    try:
        return state.metrics.of(model_name(state.fleet, asked))
    except UnknownModelError:
        return state.metrics.of("")


def served_model(state: AppState, asked: str) -> ServedModel:
    """Return the model that ``asked`` means. Raises UnknownModelError, and NoShardError if it is not known yet."""
    engine = state.fleet.engine(model_name(state.fleet, asked))
    if engine is None:
        raise NoShardError("no shard has joined yet")
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
    """Return all known models, the default first. Raises NoShardError if there is none yet."""
    served = [engine.model for engine in state.fleet.engines]
    if not served:
        raise NoShardError("no shard has joined yet")
    return served

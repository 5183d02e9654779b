"""The models of a fleet, and the names that requests have for them."""

from dataclasses import dataclass

from caravan_dialects.api.errors import UnknownModelError
from caravan_scheduler.core.engine import Engine, Fleet
from caravan_scheduler.core.request_metrics import RequestMetrics

MODEL_HEADER = "X-Model"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and the metrics of its requests."""

    engine: Engine
    metrics: RequestMetrics


def model_name(fleet: Fleet, asked: str) -> str:
    """Return the name of the model that ``asked`` means: its own, an alias or an adapter's; "" means the default.

    If the fleet is not strict, its one model answers to every name. Returns "" for the default while that is not known
    yet. Raises UnknownModelError.
    """
    engines, expected = fleet.engines, fleet.names.expected
    names = [engine.model.name for engine in engines]
    asked = fleet.names.meant(asked)
    if asked in names or asked in expected:
        return asked
    for engine in engines:
        if asked in (*engine.model.adapters, *engine.model.aliases):
            return engine.model.name
    if asked and fleet.names.strict:
        raise UnknownModelError(asked)
    return (*expected, *names, "")[0]

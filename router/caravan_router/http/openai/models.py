"""``/v1/models``."""

from aiohttp import web

from caravan_router.core.engine import ModelFacts
from caravan_router.http.generation.models import listed_models
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.schema import Model, ModelList
from caravan_router.http.server.errors import UnknownModelError
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import JSON, Parameter, Route
from caravan_router.http.server.state import STATE


async def models(request: web.Request) -> web.Response:
    """Handle ``/v1/models``."""
    reply = ModelList("list", [entry for facts in listed_models(request.app[STATE]) for entry in _entries(facts)])
    return json_reply(reply)


async def model(request: web.Request) -> web.Response:
    """Handle ``/v1/models/{model}``."""
    name = request.match_info["model"]
    for facts in listed_models(request.app[STATE]):
        for entry in _entries(facts):
            if entry.id == name:
                return json_reply(entry)
    raise UnknownModelError(name)


def _entries(facts: ModelFacts) -> list[Model]:
    """Return the model and its adapters."""
    adapters = [Model(adapter, "model", 0, facts.name, adapter, facts.name) for adapter in facts.adapters]
    return [Model(facts.name, "model", 0, facts.name, facts.name, None), *adapters]


ROUTES = (
    Route(
        method="GET",
        path="/v1/models",
        handler=models,
        dialect=OPENAI,
        summary="List the models and their adapters, the default model first",
        replies=((JSON, ModelList),),
        errors=(503,),
    ),
    Route(
        method="GET",
        path="/v1/models/{model}",
        handler=model,
        dialect=OPENAI,
        summary="Return a model or an adapter",
        parameters=(Parameter(name="model", place="path", description="Name of the model or adapter"),),
        replies=((JSON, Model),),
        errors=(404, 503),
    ),
)

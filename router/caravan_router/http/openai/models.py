"""``/v1/models``, and what a request's ``model`` selects."""

import msgspec
from aiohttp import web

from caravan_router.core.engine import ModelFacts
from caravan_router.http.generation.bounds import model_of
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.schema import Model, ModelList
from caravan_router.http.server.route import JSON, Route
from caravan_router.http.server.state import STATE


def adapter_of(name: str | None, model: ModelFacts) -> str:
    """Return the adapter that ``model`` names, "" for the model itself. Clients send any name for the model."""
    return name if name is not None and name in model.adapters else ""


async def models(request: web.Request) -> web.Response:
    """Handle ``/v1/models``."""
    facts = model_of(request.app[STATE].engine)
    adapters = [Model(adapter, "model", 0, facts.name, adapter, facts.name) for adapter in facts.adapters]
    reply = ModelList("list", [Model(facts.name, "model", 0, facts.name, facts.name, None), *adapters])
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


ROUTES = (
    Route(
        method="GET",
        path="/v1/models",
        handler=models,
        dialect=OPENAI,
        summary="List the model and its adapters",
        replies=((JSON, ModelList),),
        errors=(503,),
    ),
)

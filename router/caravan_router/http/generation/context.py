"""The context in which a body is validated: the model, its limits, the client."""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from caravan_router.auth.key import ApiKey
from caravan_router.chat.template_renderer import TemplateRenderer
from caravan_router.core.engine import Engine, ModelFacts
from caravan_router.http.generation.bounds import Bounds, bounds_of
from caravan_router.http.generation.models import ServedModel, awaited_model
from caravan_router.http.generation.schema import ServingFields
from caravan_router.http.generation.serving import Serving, serving_of
from caravan_router.http.limits import Limits
from caravan_router.http.server.state import CLIENT, STATE, TRACE


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The client of a request. ``headers`` stand in for fields that it left out; ``traceparent``: see `Serving`."""

    key: ApiKey
    headers: Mapping[str, str]
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The data that validation needs besides the body.

    ``model`` has the facts of the model that the request is for. ``adapter``: the adapter that it names in place of the
    model, "" for none.
    """

    sender: Sender
    limits: Limits
    templates: TemplateRenderer
    served: ServedModel
    model: ModelFacts
    adapter: str
    bounds: Bounds

    @property
    def engine(self) -> Engine:
        return self.served.engine

    def serving(self, fields: ServingFields) -> Serving:
        """Return how a body with ``fields`` is served. Raises ValidationError."""
        sender = self.sender
        return serving_of(fields, sender.headers, sender.key, self.limits, sender.traceparent)


async def context_of(request: web.Request, asked: str) -> Context:
    """Return the context for the model that ``asked`` means; wait for its first shard if none has joined yet.

    Raises UnknownModelError, NoShardError.
    """
    state = request.app[STATE]
    served = await awaited_model(state, asked)
    facts = served.engine.model
    return Context(
        sender=Sender(key=request[CLIENT].key, headers=request.headers, traceparent=request[TRACE].traceparent),
        limits=state.limits,
        templates=state.templates,
        served=served,
        model=facts,
        adapter=asked if asked in facts.adapters else "",
        bounds=bounds_of(state.limits, facts),
    )

"""Finds the context in which a request's body is validated."""

from aiohttp import web

from caravan_dialects.api.generation.context import Context, CountedDecoding
from caravan_dialects.api.generation.serving import Sender
from caravan_dialects.api.limits import bounds_of
from caravan_router.http.generation.models import awaited_model
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.state import CLIENT, STATE, TRACE, owner_of


async def context_of(request: web.Request, asked: str) -> Context:
    """Return the context for the model that ``asked`` means; wait for its first shard if none has joined yet.

    Raises UnknownModelError, NoShardError.
    """
    state = request.app[STATE]
    served = await awaited_model(state, asked)
    facts = served.engine.model
    return Context(
        sender=Sender(
            key=request[CLIENT].key,
            headers=request.headers,
            traceparent=request[TRACE].traceparent,
            request_id=request[REQUEST_ID],
        ),
        limits=state.limits,
        templates=state.templates,
        decoding=CountedDecoding(state.decoder, served.metrics, owner_of(request)),
        served=served,
        model=facts,
        adapter=asked if asked in facts.adapters else "",
        bounds=bounds_of(state.limits, facts),
    )

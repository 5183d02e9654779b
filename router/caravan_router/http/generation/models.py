"""The model that a request is for: its context, its metrics, and what counts against its key."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

from aiohttp import web

from caravan_dialects.api.errors import NoCatalogueError, RequestError, UnknownModelError
from caravan_dialects.api.generation.context import MODEL_HEADER, Context, CountedDecoding, ServedModel, model_name
from caravan_dialects.api.generation.permits import check_budget, check_rate, counting_failures, counting_texts
from caravan_dialects.api.generation.serving import NO_GATEWAY, Gateway, Sender, gateway_of
from caravan_dialects.api.limits import bounds_of
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import CLIENT, NAMED_MODEL, STATE, TRACE, AppState
from caravan_router.metrics.recorder import ModelMetrics
from caravan_scheduler.core.catalogue import Catalogue, CatalogueModel
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.errors import EngineError, NoShardError


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


async def context_of(request: web.Request, asked: str) -> Context:
    """Return what `sender_context` returns for the client of a request."""
    state = request.app[STATE]
    sender = Sender(
        key=request[CLIENT].key,
        headers=request.headers,
        gateway=_gateway(request, state),
        traceparent=request[TRACE].traceparent,
        request_id=request[REQUEST_ID],
    )
    return await sender_context(state, sender, asked)


async def sender_context(state: AppState, sender: Sender, asked: str) -> Context:
    """Return the context for the model that ``asked`` means; wait for its first shard if none has joined yet.

    Raises UnknownModelError, NoShardError.
    """
    served = await awaited_model(state, asked)
    facts = served.engine.model
    return Context(
        sender=sender,
        limits=state.limits,
        templates=state.templates,
        decoding=CountedDecoding(state.decoder, served.metrics, sender.key.tenant.name),
        served=served,
        model=facts,
        adapter=asked if asked in facts.adapters else "",
        bounds=bounds_of(state.limits, facts),
        tool_servers=state.tool_servers,
    )


def _gateway(request: web.Request, state: AppState) -> Gateway:
    """Return what the peer says of the request, if it may."""
    if not state.trusted_proxies:
        return NO_GATEWAY
    try:
        peer = ipaddress.ip_address(request.remote or "")
    except ValueError:
        return NO_GATEWAY
    # A listener for both protocols sees IPv4 as a part of IPv6.
    peer = getattr(peer, "ipv4_mapped", None) or peer
    return gateway_of(request.headers) if any(peer in network for network in state.trusted_proxies) else NO_GATEWAY


# Set when a request is counted in the metrics and against the rate of its key, which happens once.
_COUNTED = web.RequestKey("counted", bool)


@contextmanager
def counting_request(request: web.Request, metrics: ModelMetrics, generations: int) -> Iterator[None]:
    """Count a request for ``generations``, and count them as failed if the block raises.

    Raises RateLimitedError, whatever the block would raise, if the key has no request left in this minute, and
    BudgetError.
    """
    request[_COUNTED] = True
    metrics.request_arrived(generations)
    with counting_failures(metrics, generations):
        check_client(request)
        yield


def check_client(request: web.Request) -> None:
    """Count a request against its key's rate. Raises RateLimitedError, BudgetError."""
    client = request[CLIENT]
    check_rate(client)
    check_budget(client.key, request.app[STATE].accounts.spent(client.key.tenant.name))


def counting_refusals(handler: Handler) -> Handler:
    """Count a request for one generation if ``handler`` refuses it before the number of generations is known."""

    @wraps(handler)
    async def counted(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (RequestError, EngineError):
            if _COUNTED in request:
                raise
            asked = asked_model(request, request.get(NAMED_MODEL))
            with counting_request(request, metrics_of(request.app[STATE], asked), 1):
                raise

    return counted


def reading_texts(handler: Handler) -> Handler:
    """Count a request that only tokenizes as one of its key's that runs, and against the key's rate."""

    @wraps(handler)
    async def counted(request: web.Request) -> web.StreamResponse:
        with counting_texts(request[CLIENT]):
            return await handler(request)

    return counted

"""What operators see and change at run time: shards, cached prefixes, the timeline."""

import time

from aiohttp import web

from caravan_dialects.api.admin.descriptions import cached_prefixes, content_of, prefix_of, shard_of
from caravan_dialects.api.admin.pinning import accepted, check_length, pinned_spec
from caravan_dialects.api.admin.rules import tenant_error, unknown_parameter_error
from caravan_dialects.api.admin.schema import CachedPrefixes, PinRequest, Prefix, PrefixContent, Shards
from caravan_dialects.api.errors import TooManyViewersError, UnknownPrefixError, UnknownShardError
from caravan_dialects.api.generation.context import model_name
from caravan_dialects.api.generation.permits import holding_permits
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.generation.models import asked_model, context_of
from caravan_router.http.server.body import Tolerance
from caravan_router.http.server.event_stream import EventStream, until_the_end
from caravan_router.http.server.route import GENERATION_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import CLIENT, STATE
from caravan_router.http.server.tags import Tag
from caravan_scheduler.core import prefixes as core
from caravan_scheduler.core.generation import Tenant
from caravan_studio.timeline.messages import Message

ROUTES = Routes(TGI, tolerance=Tolerance.NEVER, operator=True, tag=Tag.ADMIN)


@ROUTES.route(
    "GET",
    "/admin/shards",
    "List the known shards with their states and the reasons for them",
    reply=Shards,
)
async def shards(request: web.Request) -> web.Response:
    now = time.monotonic()
    state = request.app[STATE]
    found = [shard_of(report, now, state.limits.max_draft_tokens) for report in state.fleet.shards()]
    return json_reply(Shards(found))


@ROUTES.route(
    "POST",
    "/admin/shards/{shard}/drain",
    "Drain a shard: it ends once its requests have finished or moved to other shards",
    parameters=(Parameter(name="shard", place="path", description="Its address, or its id if no other shard has it"),),
    reply=Shards,
    errors=(404,),
)
async def drain(request: web.Request) -> web.StreamResponse:
    """Raises UnknownShardError."""
    fleet = request.app[STATE].fleet
    name = request.match_info["shard"]
    known = [report.address for report in fleet.shards() if name in (report.address, report.shard_id)]
    if len(known) != 1 or not await fleet.drain_shard(known[0]):
        raise UnknownShardError(name)
    return await shards(request)


_SHARD = Parameter(name="shard", place="query", description="Only this shard, by its address; may be repeated")


_PREFIX = Parameter(name="prefix", place="path", description="Its id, from the list of prefixes")


@ROUTES.route(
    "GET",
    "/admin/prefixes",
    "List the cached prefixes of each shard that no running request uses",
    parameters=(_SHARD,),
    reply=CachedPrefixes,
    errors=(404, 422),
)
async def prefixes(request: web.Request) -> web.Response:
    return json_reply(cached_prefixes(_chosen(request), request.app[STATE].fleet.prefix_cache.pins()))


@ROUTES.route(
    "DELETE",
    "/admin/prefixes",
    "Evict the cached prefixes that no running request uses, and return them",
    parameters=(_SHARD,),
    reply=CachedPrefixes,
    errors=(404, 422),
)
async def flush_prefixes(request: web.Request) -> web.Response:
    shards = [found.shard for found in _chosen(request)]
    fleet = request.app[STATE].fleet
    return json_reply(cached_prefixes(await fleet.prefix_cache.flush_prefixes(shards), fleet.prefix_cache.pins()))


def _chosen(request: web.Request) -> list[core.ShardPrefixes]:
    """Return the shards that ``?shard=`` names, by default all. Raises ValidationError, UnknownShardError."""
    for parameter in request.query:
        if parameter != "shard":
            raise unknown_parameter_error("shard", parameter)
    by_shard = {found.shard: found for found in request.app[STATE].fleet.prefix_cache.cached_prefixes()}
    named = request.query.getall("shard", list(by_shard))
    for name in named:
        if name not in by_shard:
            raise UnknownShardError(name)
    return [found for name, found in by_shard.items() if name in named]


@ROUTES.route(
    "GET",
    "/admin/prefixes/{prefix}",
    "Return the tokens and the text of a cached prefix, and the shards that have it",
    parameters=(_PREFIX,),
    reply=PrefixContent,
    errors=(404, 503),
)
async def show_prefix(request: web.Request) -> web.Response:
    """Raises UnknownPrefixError, NoShardError."""
    state = request.app[STATE]
    report = _known(request, state.fleet.prefix_cache.find_prefix(request.match_info["prefix"]))
    text = None
    if report.token_ids is not None and (engine := state.fleet.engine(report.model)) is not None:
        pieces = (await engine.queries.detokenize(report.token_ids)).pieces
        text = b"".join(pieces).decode(errors="replace")
    return json_reply(content_of(report, text))


@ROUTES.route(
    "DELETE",
    "/admin/prefixes/{prefix}",
    "Evict one cached prefix from all shards, except what others share, and return it",
    parameters=(_PREFIX,),
    reply=Prefix,
    errors=(404,),
)
async def drop_prefix(request: web.Request) -> web.Response:
    """Raises UnknownPrefixError."""
    report = await request.app[STATE].fleet.prefix_cache.drop_prefix(request.match_info["prefix"])
    return json_reply(prefix_of(_known(request, report)))


@ROUTES.route(
    "POST",
    "/admin/prefixes/{prefix}/pin",
    "Pin a prefix, so that its saved runs are not evicted",
    parameters=(_PREFIX,),
    reply=Prefix,
    errors=(404, 422),
)
async def pin_prefix(request: web.Request) -> web.Response:
    """Raises UnknownPrefixError, ValidationError."""
    fleet = request.app[STATE].fleet
    known = _known(request, fleet.prefix_cache.find_prefix(request.match_info["prefix"]))
    check_length(known.tokens)
    pinned = await fleet.prefix_cache.pin_prefix(known.prefix_id)
    return json_reply(prefix_of(_known(request, accepted(pinned))))


@ROUTES.route(
    "DELETE",
    "/admin/prefixes/{prefix}/pin",
    "Unpin a prefix",
    parameters=(_PREFIX,),
    reply=Prefix,
    errors=(404,),
)
async def unpin_prefix(request: web.Request) -> web.Response:
    """Raises UnknownPrefixError if the prefix is not pinned."""
    report = request.app[STATE].fleet.prefix_cache.unpin_prefix(request.match_info["prefix"])
    return json_reply(prefix_of(_known(request, report)))


@ROUTES.route(
    "POST",
    "/admin/prefixes",
    "Compute a prefix in advance and pin it",
    reply=Prefix,
    errors=(*GENERATION_ERRORS, 422),
)
async def pin_prompt(request: web.Request, body: PinRequest) -> web.Response:
    """Raises RequestError, EngineError."""
    asked = asked_model(request, body.model)
    state = request.app[STATE]
    with holding_permits(request[CLIENT], state.permits.of(model_name(state.fleet, asked)), 1):
        context = await context_of(request, asked)
        spec = await pinned_spec(context, body, _owner_of_pin(request, body.tenant))
        report = accepted(await context.engine.pin_prompt(spec))
    assert report is not None
    return json_reply(prefix_of(report))


def _owner_of_pin(request: web.Request, name: str | None) -> Tenant:
    """Return the tenant whose requests may use the prefix. Raises ValidationError."""
    if name is None:
        return request[CLIENT].key.tenant
    keyring = request.app[STATE].keyring
    tenant = None if keyring is None else keyring.tenant(name)
    if tenant is None:
        raise tenant_error(name)
    return tenant


def _known(request: web.Request, report: core.PrefixReport | None) -> core.PrefixReport:
    if report is None:
        raise UnknownPrefixError(request.match_info["prefix"])
    return report


@ROUTES.route(
    "GET",
    "/admin/timeline",
    "Stream what the schedulers do: steps, the queue and the use of cells, without any text",
    events=Message,
    errors=(429,),
)
async def timeline(request: web.Request) -> web.StreamResponse:
    """Raises TooManyViewersError."""
    state = request.app[STATE]
    messages = state.fleet.timeline.messages()
    if messages is None:
        raise TooManyViewersError
    async with EventStream(request, {}, state.limits) as events, until_the_end(request, messages) as told:
        async for message in told:
            await events.send(message)
    return events.response

"""``/admin/prefixes``: what shards keep of ended sequences."""

from aiohttp import web

from caravan_dialects.api.admin.pinning import accepted, check_length, pinned_spec
from caravan_dialects.api.admin.prefixes import cached_prefixes, content_of, prefix_of
from caravan_dialects.api.admin.rules import tenant_error, unknown_parameter_error
from caravan_dialects.api.admin.schema import CachedPrefixes, PinRequest, Prefix, PrefixContent
from caravan_dialects.api.errors import UnknownPrefixError, UnknownShardError
from caravan_dialects.api.generation.models import model_name
from caravan_dialects.api.generation.permits import holding_permits
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.generation.context import context_of
from caravan_router.http.generation.models import asked_model
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import GENERATION_ERRORS, Parameter
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import CLIENT, STATE
from caravan_router.http.server.typed_body import Tolerance
from caravan_scheduler.core import prefixes as core
from caravan_scheduler.core.generation import Tenant

_SHARD = Parameter(name="shard", place="query", description="Only this shard, by its address; may be repeated")
_PREFIX = Parameter(name="prefix", place="path", description="Its id, from the list of prefixes")

ROUTES = Routes(TGI, tolerance=Tolerance.NEVER, operator=True)


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

"""``/admin/prefixes``: prefixes of ended sequences that shards cache for later prompts."""

import time
from collections.abc import Iterable

import msgspec
from aiohttp import web

from caravan_router.core import prefixes as core
from caravan_router.http.admin.rules import UnknownParameterError
from caravan_router.http.admin.schema import CachedPrefix, CachedPrefixes, ShardPrefixes
from caravan_router.http.server.errors import UnknownShardError
from caravan_router.http.server.route import JSON, Parameter, Route
from caravan_router.http.server.state import STATE
from caravan_router.http.tgi.errors import TGI


async def prefixes(request: web.Request) -> web.Response:
    """Handle ``GET /admin/prefixes``."""
    return _reply(_chosen(request))


async def flush_prefixes(request: web.Request) -> web.Response:
    """Handle ``DELETE /admin/prefixes``."""
    shards = [found.shard for found in _chosen(request)]
    return _reply(await request.app[STATE].engine.flush_prefixes(shards))


def _chosen(request: web.Request) -> list[core.ShardPrefixes]:
    """Return the shards that ``?shard=`` names, by default all. Raises UnknownParameterError, UnknownShardError."""
    for parameter in request.query:
        if parameter != "shard":
            raise UnknownParameterError("shard", parameter)
    by_shard = {found.shard: found for found in request.app[STATE].engine.cached_prefixes()}
    named = request.query.getall("shard", list(by_shard))
    for name in named:
        if name not in by_shard:
            raise UnknownShardError(name)
    return [found for name, found in by_shard.items() if name in named]


def _reply(found: Iterable[core.ShardPrefixes]) -> web.Response:
    now = time.monotonic()
    shards = [
        ShardPrefixes(
            shard=one.shard,
            cells=one.cells,
            memory_bytes=one.memory_bytes,
            disk_bytes=one.disk_bytes,
            prefixes=[_cached_prefix(prefix, now) for prefix in one.prefixes],
        )
        for one in found
    ]
    return web.Response(body=msgspec.json.encode(CachedPrefixes(shards)), content_type="application/json")


def _cached_prefix(prefix: core.CachedPrefix, now: float) -> CachedPrefix:
    return CachedPrefix(
        tokens=prefix.tokens,
        cells=prefix.cells,
        tenant=prefix.tenant or None,
        adapter=prefix.adapter or None,
        idle_s=round(max(0.0, now - prefix.last_used_s), 3),
    )


_SHARD = Parameter(name="shard", place="query", description="Only this shard, by its address; may be repeated")

ROUTES = (
    Route(
        method="GET",
        path="/admin/prefixes",
        handler=prefixes,
        dialect=TGI,
        summary="List the cached prefixes of each shard that no running request uses",
        parameters=(_SHARD,),
        replies=((JSON, CachedPrefixes),),
        errors=(404, 422),
        operator=True,
    ),
    Route(
        method="DELETE",
        path="/admin/prefixes",
        handler=flush_prefixes,
        dialect=TGI,
        summary="Evict the cached prefixes that no running request uses, and return them",
        parameters=(_SHARD,),
        replies=((JSON, CachedPrefixes),),
        errors=(404, 422),
        operator=True,
    ),
)

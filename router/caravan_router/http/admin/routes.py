"""``/admin/shards``: the state of each shard, and its drain. ``/admin/prefixes``: what they keep of ended sequences."""

import time
from collections.abc import Iterable

from aiohttp import web

from caravan_router.core import prefixes as core
from caravan_router.core.shards import ShardReport, ShardRoom
from caravan_router.http.admin.rules import UnknownParameterError
from caravan_router.http.admin.schema import (
    CachedPrefix,
    CachedPrefixes,
    Shard,
    ShardLimits,
    ShardPrefixes,
    Shards,
    ShardSpeculation,
)
from caravan_router.http.server.errors import UnknownShardError
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import JSON, Parameter, Route
from caravan_router.http.server.state import STATE
from caravan_router.http.tgi.errors import TGI


async def shards(request: web.Request) -> web.Response:
    """Handle ``GET /admin/shards``."""
    now = time.monotonic()
    state = request.app[STATE]
    found = [_shard(report, now, state.limits.max_draft_tokens) for report in state.fleet.shards()]
    return json_reply(Shards(found))


def _shard(report: ShardReport, now: float, speculate: int) -> Shard:
    """``speculate``: most draft tokens of a sequence in one step."""
    standing, room = report.standing, report.room
    return Shard(
        address=report.address,
        state=standing.state,
        state_s=round(now - standing.since_s, 3),
        reason=standing.reason or None,
        next_try_s=None if standing.next_try_s is None else round(max(0.0, standing.next_try_s - now), 3),
        epoch=report.epoch,
        shard_id=report.shard_id or None,
        version=report.version or None,
        model=report.model or None,
        limits=None
        if room is None
        else ShardLimits(
            max_sequences=room.max_sequences,
            max_batch_tokens=room.max_batch_tokens,
            cells=room.cells,
            cells_per_sequence=room.cells_per_sequence,
        ),
        layout=None if room is None else "unified" if room.unified else "split",
        speculation=None if room is None else _speculation(room, report.batch_invariant, speculate),
        sequences=report.sequences,
        used_cells=report.used_cells,
    )


def _speculation(room: ShardRoom, batch_invariant: bool | None, speculate: int) -> ShardSpeculation:
    reason = None
    if speculate == 0:
        reason = "the router has --speculate 0"
    elif room.draft_tokens == 0:
        reason = "the memory of its sequences cannot be cut back"
    return ShardSpeculation(
        max_draft_tokens=0 if reason else room.draft_tokens,
        off_because=reason,
        equal_lengths=not room.unified,
        batch_invariant=batch_invariant,
    )


async def drain(request: web.Request) -> web.Response:
    """Handle ``POST /admin/shards/{shard}/drain``. Raises UnknownShardError."""
    fleet = request.app[STATE].fleet
    name = request.match_info["shard"]
    known = [report.address for report in fleet.shards() if name in (report.address, report.shard_id)]
    if len(known) != 1 or not await fleet.drain_shard(known[0]):
        raise UnknownShardError(name)
    return await shards(request)


async def prefixes(request: web.Request) -> web.Response:
    """Handle ``GET /admin/prefixes``."""
    return _reply(_chosen(request))


async def flush_prefixes(request: web.Request) -> web.Response:
    """Handle ``DELETE /admin/prefixes``."""
    shards = [found.shard for found in _chosen(request)]
    return _reply(await request.app[STATE].fleet.flush_prefixes(shards))


def _chosen(request: web.Request) -> list[core.ShardPrefixes]:
    """Return the shards that ``?shard=`` names, by default all. Raises UnknownParameterError, UnknownShardError."""
    for parameter in request.query:
        if parameter != "shard":
            raise UnknownParameterError("shard", parameter)
    by_shard = {found.shard: found for found in request.app[STATE].fleet.cached_prefixes()}
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
    return json_reply(CachedPrefixes(shards))


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
        path="/admin/shards",
        handler=shards,
        dialect=TGI,
        summary="List the shards that the router knows, with the state of each and the reason for it",
        replies=((JSON, Shards),),
        operator=True,
    ),
    Route(
        method="POST",
        path="/admin/shards/{shard}/drain",
        handler=drain,
        dialect=TGI,
        summary="Let a shard end once its requests have moved to other shards or ended",
        parameters=(
            Parameter(name="shard", place="path", description="Its address, or its id if no other shard has it"),
        ),
        replies=((JSON, Shards),),
        errors=(404,),
        operator=True,
    ),
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

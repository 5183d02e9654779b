"""``/admin/shards``: the state of each shard, and its drain."""

import time

from aiohttp import web

from caravan_dialects.api.admin.descriptions import shard_of
from caravan_dialects.api.admin.schema import Shards
from caravan_dialects.api.errors import UnknownShardError
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import Parameter
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.typed_body import Tolerance

ROUTES = Routes(TGI, tolerance=Tolerance.NEVER, operator=True)


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

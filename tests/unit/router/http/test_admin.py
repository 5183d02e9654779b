"""Routes for operators: their effects, and which API keys may use them."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from aiohttp.web_urldispatcher import UrlMappingMatchInfo

from caravan_router.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.core.prefixes import CachedPrefix, ShardPrefixes
from caravan_router.core.shards import ShardReport, ShardRoom, ShardStanding, ShardState
from caravan_router.core.tenant import Tenant
from caravan_router.http.app import Access
from caravan_router.http.limits import Limits
from caravan_router.http.routes import ROUTES
from caravan_router.http.server.authentication import Authentication
from caravan_router.http.server.errors import NotLocalError
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import ScriptedEngine

KEYS = [
    ApiKey(digest=digest_of("a-key"), tenant=Tenant(name="alice")),
    ApiKey(digest=digest_of("o-key"), tenant=Tenant(name="olga"), operator=True),
]
AS_ALICE, AS_OPERATOR = {"Authorization": "Bearer a-key"}, {"Authorization": "Bearer o-key"}
IDLE_S = 30.0


@pytest.fixture
def engine() -> ScriptedEngine:
    used = time.monotonic() - IDLE_S
    hers = CachedPrefix(tokens=40, cells=12, tenant="alice", adapter="pirate", last_used_s=used)
    nobodys = CachedPrefix(tokens=20, cells=20, tenant="", adapter="", last_used_s=used)
    shards = [
        ShardPrefixes(shard="unix:/a.sock", cells=40, memory_bytes=3000, disk_bytes=500, prefixes=(hers, nobodys)),
        ShardPrefixes(shard="host:2", cells=0, memory_bytes=0, disk_bytes=0, prefixes=()),
    ]
    return ScriptedEngine(prefixes={one.shard: one for one in shards})


@pytest.fixture
async def locked(engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with serving(engine, access=Access(keyring=Keyring(KEYS, time.monotonic()))) as running:
        yield running


FIRST: dict[str, Any] = {
    "shard": "unix:/a.sock",
    "cells": 40,
    "memory_bytes": 3000,
    "disk_bytes": 500,
    "prefixes": [
        {"tokens": 40, "cells": 12, "tenant": "alice", "adapter": "pirate"},
        {"tokens": 20, "cells": 20, "tenant": None, "adapter": None},
    ],
}
SECOND: dict[str, Any] = {"shard": "host:2", "cells": 0, "memory_bytes": 0, "disk_bytes": 0, "prefixes": []}


async def ask(service: Service, method: str, path: str = "/admin/prefixes") -> list[dict[str, Any]]:
    response = await service.client.request(method, path)
    assert response.status == 200, await response.text()
    shards: list[dict[str, Any]] = (await response.json())["shards"]
    for shard in shards:
        for prefix in shard["prefixes"]:
            assert IDLE_S <= prefix.pop("idle_s") < IDLE_S + 60
    return shards


async def test_prefixes_are_listed(service: Service) -> None:
    assert await ask(service, "GET") == [FIRST, SECOND]
    assert await ask(service, "GET", "/admin/prefixes?shard=host:2") == [SECOND]


async def test_prefixes_are_flushed(service: Service) -> None:
    assert await ask(service, "DELETE") == [FIRST, SECOND]
    assert await ask(service, "GET") == [FIRST | SECOND | {"shard": FIRST["shard"]}, SECOND]


async def test_prefixes_of_named_shards_are_flushed(service: Service) -> None:
    assert await ask(service, "DELETE", "/admin/prefixes?shard=host:2") == [SECOND]
    assert await ask(service, "GET") == [FIRST, SECOND]
    assert await ask(service, "DELETE", "/admin/prefixes?shard=host:2&shard=unix:/a.sock") == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("query", "status", "error_type", "message"),
    [
        ("shard=x", 404, "not_found", "No shard of this name is up. Given: x"),
        ("shard=host:2&shard=", 404, "not_found", "No shard of this name is up. Given: "),
        (
            "shrad=host:2",
            422,
            "validation",
            "Input validation error: the URL may have the parameter `shard` only. Given: 'shrad'",
        ),
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_unknown_shards_and_query_parameters_are_refused(
    service: Service, method: str, query: str, status: int, error_type: str, message: str
) -> None:
    response = await service.client.request(method, f"/admin/prefixes?{query}")
    assert (response.status, await response.json()) == (status, {"error": message, "error_type": error_type})
    assert await ask(service, "GET") == [FIRST, SECOND]


async def test_shards_are_listed(service: Service) -> None:
    now = time.monotonic()
    room = ShardRoom(max_sequences=8, max_batch_tokens=512, cells=4096, cells_per_sequence=512, unified=False)
    new, lost = (
        ShardStanding(state=ShardState.JOINING, since_s=now - 5.0),
        ShardStanding(state=ShardState.LOST, since_s=now - 60.0, reason="UNAVAILABLE: gone", next_try_s=now + 3.0),
    )
    service.engine.reports = [
        ShardReport(address="10.0.0.1:1", standing=new, epoch=0),
        ShardReport(
            address="unix:/b",
            standing=lost,
            epoch=7,
            shard_id="b",
            version="1.2",
            model="toy",
            room=room,
            sequences=2,
            used_cells=99,
        ),
    ]
    response = await service.client.get("/admin/shards")
    first, second = (await response.json())["shards"]
    assert 5.0 <= first.pop("state_s") < 60.0 <= second.pop("state_s")
    assert 0.0 <= second.pop("next_try_s") <= 3.0
    unknown = ["reason", "next_try_s", "shard_id", "version", "model", "limits", "layout", "speculation"]
    nothing = dict.fromkeys(unknown)
    assert first == {"address": "10.0.0.1:1", "state": "joining", "epoch": 0, "sequences": 0, "used_cells": 0} | nothing
    assert second == {
        "address": "unix:/b",
        "state": "lost",
        "reason": "UNAVAILABLE: gone",
        "epoch": 7,
        "shard_id": "b",
        "version": "1.2",
        "model": "toy",
        "limits": {"max_sequences": 8, "max_batch_tokens": 512, "cells": 4096, "cells_per_sequence": 512},
        "layout": "split",
        "speculation": {
            "max_draft_tokens": 0,
            "off_because": "the router has --speculate 0",
            "equal_lengths": True,
            "batch_invariant": None,
        },
        "sequences": 2,
        "used_cells": 99,
    }


@pytest.mark.parametrize(
    ("draft_tokens", "most", "reason"), [(64, 64, None), (0, 0, "the memory of its sequences cannot be cut back")]
)
async def test_operators_see_whether_drafts_are_possible(draft_tokens: int, most: int, reason: str | None) -> None:
    room = ShardRoom(
        max_sequences=8,
        max_batch_tokens=512,
        cells=4096,
        cells_per_sequence=512,
        unified=True,
        draft_tokens=draft_tokens,
    )
    engine = ScriptedEngine()
    engine.reports = [
        ShardReport(address="1", standing=standing(ShardState.SERVING), epoch=1, room=room, batch_invariant=True)
    ]
    async with serving(engine, Limits(max_draft_tokens=8)) as service:
        response = await service.client.get("/admin/shards")
        (shard,) = (await response.json())["shards"]
    expected = {"max_draft_tokens": most, "off_because": reason, "equal_lengths": False, "batch_invariant": True}
    assert shard["speculation"] == expected


def standing(state: ShardState) -> ShardStanding:
    return ShardStanding(state=state, since_s=time.monotonic())


@pytest.mark.parametrize("name", ["unix:%2Fb", "b"])
async def test_a_shard_is_drained_by_its_address_or_its_id(service: Service, name: str) -> None:
    service.engine.reports = [
        ShardReport(address="unix:/a", standing=standing(ShardState.SERVING), epoch=1, shard_id="a"),
        ShardReport(address="unix:/b", standing=standing(ShardState.SERVING), epoch=1, shard_id="b"),
    ]
    response = await service.client.post(f"/admin/shards/{name}/drain")
    states = [shard["state"] for shard in (await response.json())["shards"]]
    assert (response.status, states) == (200, ["serving", "draining"])


@pytest.mark.parametrize("name", ["c", "same", "down"])
async def test_only_one_shard_that_is_up_is_drained(service: Service, name: str) -> None:
    service.engine.reports = [
        ShardReport(address="1", standing=standing(ShardState.SERVING), epoch=1, shard_id="same"),
        ShardReport(address="2", standing=standing(ShardState.SERVING), epoch=1, shard_id="same"),
        ShardReport(address="3", standing=standing(ShardState.LOST), epoch=1, shard_id="down"),
    ]
    response = await service.client.post(f"/admin/shards/{name}/drain")
    message = f"No shard of this name is up. Given: {name}"
    assert (response.status, await response.json()) == (404, {"error": message, "error_type": "not_found"})
    assert not any(report.standing.state is ShardState.DRAINING for report in service.engine.reports)


OPERATOR_ROUTES = [(route.method, route.path) for route in ROUTES if route.path.startswith("/admin/")]


def test_every_route_under_admin_is_for_operators() -> None:
    assert [(route.method, route.path) for route in ROUTES if route.operator] == OPERATOR_ROUTES


@pytest.mark.parametrize(("method", "path"), OPERATOR_ROUTES)
async def test_routes_under_admin_need_the_key_of_an_operator(locked: Service, method: str, path: str) -> None:
    assert (await locked.client.request(method, path)).status == 401
    response = await locked.client.request(method, path, headers=AS_ALICE)
    assert (response.status, await response.json()) == (
        403,
        {
            "error": "This route needs the API key of an operator: its entry must have `operator = true`",
            "error_type": "forbidden",
        },
    )
    assert len(locked.engine.prefixes["unix:/a.sock"].prefixes) == 2
    served = 404 if "{" in path else 200
    assert (await locked.client.request(method, path, headers=AS_OPERATOR)).status == served


@pytest.mark.parametrize(("method", "path"), OPERATOR_ROUTES)
@pytest.mark.parametrize(
    "headers",
    [{"X-Forwarded-For": "10.0.0.9"}, {"Forwarded": "for=10.0.0.9"}, {"Origin": "https://example.com"}],
    ids=lambda headers: next(iter(headers)),
)
async def test_without_keys_routes_under_admin_answer_programs_on_this_host_only(
    service: Service, method: str, path: str, headers: dict[str, str]
) -> None:
    response = await service.client.request(method, path, headers=headers)
    assert (response.status, (await response.json())["error_type"]) == (403, "forbidden")
    assert len(service.engine.prefixes["unix:/a.sock"].prefixes) == 2
    assert (await service.client.request(method, path)).status == (404 if "{" in path else 200)


@pytest.mark.parametrize(
    ("remote", "allowed"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("10.0.0.9", False), ("", False)]
)
async def test_without_keys_the_address_of_the_client_decides(remote: str, allowed: bool) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response()

    request = make_mocked_request("GET", "/admin/shards").clone(remote=remote)
    request._match_info = UrlMappingMatchInfo({}, web.Application().router.add_get("/admin/shards", answer))
    identify = Authentication(None, ROUTES).identify
    if allowed:
        assert (await identify(request, answer)).status == 200
    else:
        with pytest.raises(NotLocalError):
            await identify(request, answer)


async def test_an_operator_may_use_every_other_route(locked: Service) -> None:
    assert (await locked.client.get("/v1/models", headers=AS_OPERATOR)).status == 200

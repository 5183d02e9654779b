"""Routes for operators: their effects, and which API keys may use them."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from aiohttp.web_urldispatcher import UrlMappingMatchInfo

from caravan_dialects.api.admin.descriptions import shard_of
from caravan_dialects.api.errors import NotLocalError
from caravan_dialects.api.limits import Limits
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_proto.messages.model import Kernels, Numerics
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_router.http.routes import ROUTES
from caravan_router.http.server.authentication import Authentication
from caravan_router.http.server.state import ENDING
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.core.prefixes import CachedPrefix, RunningSequence, ShardPrefixes
from caravan_scheduler.core.shards import ShardReport, ShardRoom, ShardStanding, ShardState
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import BOS, CHAT_MODEL, ScriptedEngine, ids_of
from caravan_testing.waiting import eventually

KEYS = [
    ApiKey(digest=digest_of("a-key"), tenant=Tenant(name="alice")),
    ApiKey(digest=digest_of("o-key"), tenant=Tenant(name="olga"), operator=True),
]


AS_ALICE, AS_OPERATOR = {"Authorization": "Bearer a-key"}, {"Authorization": "Bearer o-key"}


IDLE_S = 30.0


TAG, KEY, OTHER_KEY = "0123abcd", bytes(range(16)), bytes(16)


@pytest.fixture
def engine() -> ScriptedEngine:
    used = time.monotonic() - IDLE_S
    hers = CachedPrefix(key=KEY, tokens=40, cells=12, tenant="alice", adapter="pirate", last_used_s=used)
    nobodys = CachedPrefix(
        key=OTHER_KEY,
        tokens=20,
        cells=0,
        tenant="",
        adapter="",
        last_used_s=used,
        memory_bytes=2000,
        disk_bytes=500,
        pinned=True,
    )
    running = RunningSequence(request_id="r-1", tenant="alice", adapter="", tokens=33)
    shards = [
        ShardPrefixes(
            shard="unix:/a.sock",
            cells=40,
            memory_bytes=3000,
            disk_bytes=500,
            pinned_bytes=2500,
            prefixes=(hers, nobodys),
            running=(running,),
            model_tag=TAG,
        ),
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
        {
            "id": TAG + KEY.hex(),
            "tokens": 40,
            "cells": 12,
            "memory_bytes": 0,
            "disk_bytes": 0,
            "tenant": "alice",
            "adapter": "pirate",
            "pinned": False,
        },
        {
            "id": TAG + OTHER_KEY.hex(),
            "tokens": 20,
            "cells": 0,
            "memory_bytes": 2000,
            "disk_bytes": 500,
            "tenant": None,
            "adapter": None,
            "pinned": True,
        },
    ],
    "pinned_bytes": 2500,
    "running": [{"request_id": "r-1", "tokens": 33, "tenant": "alice", "adapter": None}],
}


NOTHING: dict[str, Any] = {
    "cells": 0,
    "memory_bytes": 0,
    "disk_bytes": 0,
    "pinned_bytes": 0,
    "prefixes": [],
    "running": [],
}


SECOND: dict[str, Any] = {"shard": "host:2"} | NOTHING


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
    assert await ask(service, "GET") == [FIRST | NOTHING, SECOND]


async def test_prefixes_of_named_shards_are_flushed(service: Service) -> None:
    assert await ask(service, "DELETE", "/admin/prefixes?shard=host:2") == [SECOND]
    assert await ask(service, "GET") == [FIRST, SECOND]
    assert await ask(service, "DELETE", "/admin/prefixes?shard=host:2&shard=unix:/a.sock") == [FIRST, SECOND]


@pytest.mark.parametrize(
    ("query", "status", "error_type", "message"),
    [
        ("shard=x", 404, "not_found", "No shard with this name is up. Given: x"),
        ("shard=host:2&shard=", 404, "not_found", "No shard with this name is up. Given: "),
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


async def test_a_prefix_is_shown_with_its_text(service: Service) -> None:
    service.engine.contents[KEY] = ids_of("You are")
    response = await service.client.get(f"/admin/prefixes/{TAG}{KEY.hex()}")
    shown = await response.json()
    [place] = shown["shards"]
    assert IDLE_S <= place.pop("idle_s") < IDLE_S + 60
    assert (response.status, shown) == (
        200,
        {
            "id": TAG + KEY.hex(),
            "model": "scripted",
            "tokens": 40,
            "tenant": "alice",
            "adapter": "pirate",
            "pinned": False,
            "shards": [{"shard": "unix:/a.sock", "cells": 12, "memory_bytes": 0, "disk_bytes": 0}],
            "token_ids": list(ids_of("You are")),
            "text": "You are",
        },
    )
    response = await service.client.get(f"/admin/prefixes/{TAG}{OTHER_KEY.hex()}")
    shown = await response.json()
    assert (shown["token_ids"], shown["text"]) == (None, None), "no shard has all of its tokens"


async def test_one_prefix_is_dropped(service: Service) -> None:
    response = await service.client.delete(f"/admin/prefixes/{TAG}{KEY.hex()}")
    dropped = await response.json()
    assert (response.status, dropped["id"], dropped["tokens"]) == (200, TAG + KEY.hex(), 40)
    assert "text" not in dropped
    [listed, _] = await ask(service, "GET")
    assert [prefix["id"] for prefix in listed["prefixes"]] == [TAG + OTHER_KEY.hex()]


HERS = f"/admin/prefixes/{TAG}{KEY.hex()}"


async def test_a_prefix_is_pinned_and_unpinned(service: Service) -> None:
    response = await service.client.post(f"{HERS}/pin")
    assert (response.status, (await response.json())["pinned"]) == (200, True)
    [pin] = (await (await service.client.get("/admin/prefixes")).json())["pins"]
    assert (pin["id"], pin["tokens"], pin["shards"][0]["shard"]) == (TAG + KEY.hex(), 40, "unix:/a.sock")
    response = await service.client.delete(f"{HERS}/pin")
    assert (response.status, (await response.json())["pinned"]) == (200, False)
    assert (await (await service.client.get("/admin/prefixes")).json())["pins"] == []
    assert (await service.client.delete(f"{HERS}/pin")).status == 404


async def test_a_prefix_that_is_too_large_or_too_short_is_not_pinned(service: Service) -> None:
    service.engine.most_pinned = 39
    response = await service.client.post(f"{HERS}/pin")
    assert (await response.json())["error"] == (
        "Input validation error: all pinned prefixes together may take 39 bytes, half of the smallest shard's memory "
        "for saved prefixes (--cache-ram). With this one, they would take 40"
    )
    short = CachedPrefix(key=KEY, tokens=15, cells=15, tenant="", adapter="", last_used_s=0.0)
    first = service.engine.prefixes["unix:/a.sock"]
    service.engine.prefixes["unix:/a.sock"] = replace(first, prefixes=(short,))
    response = await service.client.post(f"{HERS}/pin")
    assert (response.status, (await response.json())["error"]) == (
        422,
        "Input validation error: a prefix that is pinned must have at least 16 tokens. Given: 15",
    )


SYSTEM = "You answer in rhymes."


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"prompt": SYSTEM}, (BOS, *ids_of(SYSTEM))),
        ({"prompt": list(range(20))}, tuple(range(20))),
        ({"messages": [{"role": "system", "content": SYSTEM}]}, (BOS, *ids_of(SYSTEM))),
    ],
    ids=["text", "tokens", "messages"],
)
async def test_a_prompt_is_computed_and_pinned(body: dict[str, Any], prompt: tuple[int, ...]) -> None:
    engine = ScriptedEngine(model=CHAT_MODEL)
    async with serving(engine) as service:
        response = await service.client.post("/admin/prefixes", json=body | {"model": "pirate", "cache_salt": "x"})
        shown = await response.json()
    assert (response.status, shown["id"], shown["tokens"], shown["pinned"]) == (200, "an-id", len(prompt), True)
    [spec] = engine.pinned_specs
    assert (spec.prompt, spec.stopping.max_new_tokens, spec.adapter) == (prompt, 1, "pirate")
    asked = {"inputs": SYSTEM, "cache_salt": "x", "parameters": {"adapter_id": "pirate"}}
    async with serving(engine) as service:
        assert (await service.client.post("/generate", json=asked)).status == 200
    assert engine.spec.namespace == spec.namespace, "requests of its owner find it"


async def test_a_prefix_is_pinned_for_an_api_key(locked: Service) -> None:
    for tenant, name in (({}, "olga"), ({"tenant": "alice"}, "alice")):
        response = await locked.client.post("/admin/prefixes", json={"prompt": SYSTEM} | tenant, headers=AS_OPERATOR)
        assert (response.status, (await response.json())["tenant"]) == (200, name)
    await locked.client.post("/generate", json={"inputs": SYSTEM}, headers=AS_ALICE)
    assert locked.engine.spec.namespace == locked.engine.pinned_specs[-1].namespace


async def test_pinning_takes_a_permit() -> None:
    async with serving(ScriptedEngine(), Limits(max_concurrent_requests=1)) as service:
        service.engine.tokenizing = asyncio.Event()
        first = asyncio.create_task(service.client.post("/admin/prefixes", json={"prompt": SYSTEM}))
        await eventually(lambda: not service.is_idle(), "the first has the permit")
        assert (await service.client.post("/admin/prefixes", json={"prompt": SYSTEM})).status == 429
        service.engine.tokenizing.set()
        assert (await first).status == 200


@pytest.mark.parametrize(("method", "end"), [("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("DELETE", "/pin")])
@pytest.mark.parametrize("prefix", [TAG + "f" * 32, "f" * 40, "x", TAG + KEY.hex().upper()])
async def test_unknown_prefixes_are_refused(service: Service, method: str, end: str, prefix: str) -> None:
    response = await service.client.request(method, f"/admin/prefixes/{prefix}{end}")
    message = f"No shard that is up has a prefix with this id. Given: {prefix}"
    assert (response.status, await response.json()) == (404, {"error": message, "error_type": "not_found"})


OPERATOR_ROUTES = [(route.method, route.path) for route in ROUTES if route.path.startswith("/admin/")]


# Those that load, unload, download and delete models, and tell of it.
LIBRARY_ROUTES = [
    ("POST", "/models/load"),
    ("POST", "/models/unload"),
    ("GET", "/models/sse"),
    ("POST", "/api/pull"),
    ("DELETE", "/api/delete"),
    ("POST", "/api/copy"),
    ("POST", "/api/create"),
]
ADAPTER_ROUTES = [("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")]


def test_every_route_under_admin_and_of_the_catalogue_is_for_operators() -> None:
    found = [(route.method, route.path) for route in ROUTES if route.operator]
    assert sorted(found) == sorted(OPERATOR_ROUTES + LIBRARY_ROUTES + ADAPTER_ROUTES)


@pytest.mark.parametrize(("method", "path"), LIBRARY_ROUTES + ADAPTER_ROUTES)
async def test_routes_of_the_catalogue_and_of_adapters_need_the_key_of_an_operator(
    locked: Service, method: str, path: str
) -> None:
    assert (await locked.client.request(method, path)).status == 401
    assert (await locked.client.request(method, path, headers=AS_ALICE)).status == 403


@pytest.mark.parametrize(("method", "path"), OPERATOR_ROUTES)
async def test_routes_under_admin_need_the_key_of_an_operator(locked: Service, method: str, path: str) -> None:
    assert (await locked.client.request(method, path)).status == 401
    response = await locked.client.request(method, path, headers=AS_ALICE)
    assert (response.status, await response.json()) == (
        403,
        {
            "error": "This route needs the API key of an operator: one with `operator = true` in the file of keys",
            "error_type": "forbidden",
        },
    )
    assert len(locked.engine.prefixes["unix:/a.sock"].prefixes) == 2
    async with locked.client.request(method, path, headers=AS_OPERATOR) as allowed:
        assert allowed.status == _served(method, path)


def _served(method: str, path: str) -> int:
    """Return the status of a request that is allowed, has no body, and names nothing that there is."""
    if "{" in path:
        return 404
    return 415 if method == "POST" else 200


@pytest.mark.parametrize(("method", "path"), OPERATOR_ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "10.0.0.9"},
        {"Forwarded": "for=10.0.0.9"},
        {"X-Forwarded-Proto": "https"},
        {"X-Real-IP": "10.0.0.9"},
        {"CF-Connecting-IP": "10.0.0.9"},
        {"Via": "1.1 proxy"},
        {"Origin": "https://example.com"},
    ],
    ids=lambda headers: next(iter(headers)),
)
async def test_without_keys_routes_under_admin_answer_programs_on_this_host_only(
    service: Service, method: str, path: str, headers: dict[str, str]
) -> None:
    response = await service.client.request(method, path, headers=headers)
    assert (response.status, (await response.json())["error_type"]) == (403, "forbidden")
    assert len(service.engine.prefixes["unix:/a.sock"].prefixes) == 2
    async with service.client.request(method, path) as allowed:
        assert allowed.status == _served(method, path)


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"Origin": "{own}", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Host": "localhost:3000", "Origin": "http://localhost:3000"}, True),
        ({"Host": "[::1]:3000", "Origin": "http://[::1]:3000"}, True),
        ({"Host": "localhost:3000", "Origin": "http://localhost:8000"}, False),
        ({"Host": "localhost:3000", "Origin": "https://localhost:3000"}, False),
        ({"Origin": "null"}, False),
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        # The page of a host whose name leads here since it was loaded.
        ({"Host": "example.com:3000", "Origin": "http://example.com:3000"}, False),
        ({"Host": "example.com:3000"}, False),
        ({"Host": "localhost.example.com"}, False),
        ({"Host": ""}, False),
    ],
)
async def test_without_keys_the_routers_own_page_may_use_routes_under_admin_and_no_other_page(
    service: Service, headers: dict[str, str], allowed: bool
) -> None:
    sent = {name: value.replace("{own}", service.url) for name, value in headers.items()}
    assert (await service.client.get("/admin/shards", headers=sent)).status == (200 if allowed else 403)


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


async def test_the_timeline_is_a_stream_that_ends_with_the_server(engine: ScriptedEngine) -> None:
    async with serving(engine) as service:
        async with service.client.get("/admin/timeline") as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            assert await response.content.readline() == b'data: {"type":"gone","model":"scripted","at":1.0}\n'
            service.app[ENDING].set()
            assert await response.content.read() == b"\n"
        engine.may_watch = False
        async with service.client.get("/admin/timeline") as refused:
            assert (refused.status, (await refused.json())["error_type"]) == (429, "overloaded")


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
            model_fingerprint="toy-1",
            room=room,
            numerics=Numerics(
                fingerprint="ab12",
                exact=False,
                flash_attention={"split": False},
                same_in_company=True,
                same_in_chunks=None,
                kernels=Kernels.STOCK,
            ),
            sequences=2,
            used_cells=99,
        ),
    ]
    response = await service.client.get("/admin/shards")
    first, second = (await response.json())["shards"]
    assert 5.0 <= first.pop("state_s") < 60.0 <= second.pop("state_s")
    assert 0.0 <= second.pop("next_try_s") <= 3.0
    unknown = ["reason", "next_try_s", "shard_id", "version", "model", "model_fingerprint"]
    nothing: dict[str, Any] = dict.fromkeys([*unknown, "limits", "layout", "speculation", "numerics"])
    nothing["adapters"] = []
    assert first == {"address": "10.0.0.1:1", "state": "joining", "epoch": 0, "sequences": 0, "used_cells": 0} | nothing
    assert second == {
        "address": "unix:/b",
        "state": "lost",
        "reason": "UNAVAILABLE: gone",
        "epoch": 7,
        "shard_id": "b",
        "version": "1.2",
        "model": "toy",
        "model_fingerprint": "toy-1",
        "limits": {"max_sequences": 8, "max_batch_tokens": 512, "cells": 4096, "cells_per_sequence": 512},
        "layout": "split",
        "speculation": {
            "max_draft_tokens": 0,
            "off_because": "the router has --speculate 0",
            "equal_lengths": True,
        },
        "numerics": {
            "fingerprint": "ab12",
            "exact": False,
            "flash_attention": {"split": False},
            "same_in_company": True,
            "same_in_chunks": None,
            "kernels": "stock",
        },
        "sequences": 2,
        "used_cells": 99,
        "adapters": [],
    }


CANNOT_CUT_BACK = "the memory of its sequences cannot be cut back (see the shard's --rollback-tokens)"


@pytest.mark.parametrize(("draft_tokens", "most", "reason"), [(64, 64, None), (0, 0, CANNOT_CUT_BACK)])
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
    engine.reports = [ShardReport(address="1", standing=standing(ShardState.SERVING), epoch=1, room=room)]
    async with serving(engine, Limits(max_draft_tokens=8)) as service:
        response = await service.client.get("/admin/shards")
        (shard,) = (await response.json())["shards"]
    expected = {"max_draft_tokens": most, "off_because": reason, "equal_lengths": False}
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
    message = f"No shard with this name is up. Given: {name}"
    assert (response.status, await response.json()) == (404, {"error": message, "error_type": "not_found"})
    assert not any(report.standing.state is ShardState.DRAINING for report in service.engine.reports)


@pytest.mark.parametrize(
    ("unified", "exact", "compared", "shown"),
    [
        (False, False, True, True),
        # It was compared in the split layout, which the shard has left.
        (True, False, True, False),
        (True, False, None, None),
        (True, True, True, True),
    ],
)
def test_a_text_may_depend_on_its_company_in_the_unified_layout(
    unified: bool, exact: bool, compared: bool | None, shown: bool | None
) -> None:
    report = ShardReport(
        address="a",
        epoch=1,
        standing=ShardStanding(state=ShardState.SERVING, since_s=0.0),
        room=ShardRoom(
            max_sequences=8, max_batch_tokens=512, cells=64, cells_per_sequence=8, unified=unified, draft_tokens=0
        ),
        numerics=Numerics(fingerprint="f", exact=exact, same_in_company=compared),
    )
    numerics = shard_of(report, 1.0, 0).numerics
    assert numerics is not None
    assert numerics.same_in_company is shown

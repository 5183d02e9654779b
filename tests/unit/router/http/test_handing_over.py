"""While a router has no shard of a model, another one that has answers its requests."""

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import OPEN_TO_ALL, Access
from caravan_scheduler.core.generation import Tenant
from caravan_testing.http_server import Service, events, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine
from caravan_testing.waiting import eventually

BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 3}


@asynccontextmanager
async def neighbours(access: Access = OPEN_TO_ALL) -> AsyncIterator[tuple[Service, Service]]:
    """Two routers, of which the first has no shard and knows the second one's URL."""
    async with serving(ScriptedEngine(), access=access) as second, serving(ScriptedEngine(), access=access) as first:
        first.engine.healthy = False
        first.engine.neighbour_url = second.url
        yield first, second


async def test_a_whole_reply_and_a_stream_are_those_of_the_neighbour() -> None:
    async with neighbours() as (first, second):
        whole = await first.reply("/v1/completions", BODY)
        assert whole["choices"][0]["text"] == " w1 w2 w3"
        response = await first.post("/v1/completions", {**BODY, "stream": True})
        assert response.content_type == "text/event-stream"
        *pieces, done = events(await response.text())
        assert ("".join(piece["choices"][0]["text"] for piece in pieces), done) == (" w1 w2 w3", "[DONE]")
        assert (len(first.engine.streams), len(second.engine.streams)) == (0, 2)
        await eventually(second.is_idle)


async def test_a_router_with_a_borrowed_shard_begins_nothing_new() -> None:
    async with neighbours() as (first, second):
        first.engine.healthy, first.engine.borrows = True, True
        await first.reply("/v1/completions", BODY)
        assert (len(first.engine.streams), len(second.engine.streams)) == (0, 1)
        # What was handed over to it is not handed back.
        response = await first.post("/v1/completions", BODY, X_Caravan_Handed_Over="1")
        assert response.status == 200
        assert (len(first.engine.streams), len(second.engine.streams)) == (1, 1)


async def test_a_stream_arrives_as_it_is_generated_and_ends_with_its_client() -> None:
    async with neighbours() as (first, second):
        second.engine.step_s = 0.01
        async with first.client.post("/v1/completions", json={**BODY, "stream": True, "max_tokens": 200}) as response:
            await response.content.readline()
            assert not second.is_idle()
        await eventually(second.is_idle)


@pytest.mark.parametrize(
    ("body", "status"), [({**BODY, "max_tokens": -2}, 400), ({**BODY, "top_p": 2}, 400), ({}, 400)]
)
async def test_errors_are_those_of_the_neighbour(body: dict[str, Any], status: int) -> None:
    async with neighbours() as (first, second):
        handed, own = await first.post("/v1/completions", body), await second.post("/v1/completions", body)
        assert (handed.status, own.status) == (status, status)
        assert await handed.json() == await own.json()


async def test_keys_and_request_ids_go_along() -> None:
    key = ApiKey(digest=digest_of("secret"), tenant=Tenant(name="alice"))
    async with neighbours(Access(keyring=Keyring([key], 0.0))) as (first, second):
        assert (await first.post("/v1/completions", BODY)).status == 401
        response = await first.post("/v1/completions", BODY, Authorization="Bearer secret", X_Request_Id="mine")
        assert (response.status, response.headers.getall("X-Request-Id")) == (200, ["mine"])
        (stream,) = second.engine.streams
        assert (stream.spec.tenant.name, stream.spec.request_id) == ("alice", "mine")


async def test_a_page_gets_one_header_for_its_origin() -> None:
    async with neighbours() as (first, _):
        response = await first.post("/v1/completions", BODY, Origin="https://page.example")
        assert len(response.headers.getall("Access-Control-Allow-Origin")) == 1


async def test_a_compressed_body_is_handed_over_once_it_is_read() -> None:
    async with neighbours() as (first, second):
        data = gzip.compress(json.dumps(BODY).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with first.client.post("/v1/completions", data=data, headers=headers) as response:
            assert response.status == 200
        assert len(second.engine.streams) == 1


async def test_what_was_handed_over_is_not_handed_over_again() -> None:
    async with neighbours() as (first, second):
        second.engine.healthy = False
        second.engine.neighbour_url = first.url
        await first.reply("/v1/completions", BODY)
        assert (len(first.engine.streams), len(second.engine.streams)) == (0, 1)


async def test_a_request_waits_here_if_the_neighbour_cannot_be_reached() -> None:
    async with serving(ScriptedEngine()) as first:
        first.engine.healthy = False
        first.engine.neighbour_url = "http://127.0.0.1:1"
        await first.reply("/v1/completions", BODY)
        assert len(first.engine.streams) == 1


async def load(service: Service, name: str) -> int:
    """Load an adapter; return the status of the reply."""
    return (await service.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"{name}.gguf"})).status


async def test_a_request_for_an_adapter_is_answered_where_that_is_loaded() -> None:
    async with neighbours() as (first, second):
        assert [await load(first, "poet"), await load(first, "cook"), await load(second, "cook")] == [200] * 3
        # Of a single model, the neighbour would answer to any name, without the adapter.
        for name in ("poet", "cook"):
            assert (await first.reply("/v1/completions", {**BODY, "model": name}))["model"] == name
        assert (len(first.engine.streams), len(second.engine.streams)) == (1, 1)
        assert await first.sample("caravan_requests_handed_over_total") == 1
        # One of the shards' own.
        await first.reply("/v1/completions", BODY, X_Model="pirate")
        assert len(second.engine.streams) == 2


async def test_an_adapter_that_only_the_neighbour_has_loaded_is_asked_for_there() -> None:
    async with neighbours() as (first, second):
        first.engine.expected = second.engine.expected = ("scripted",)
        assert await load(second, "cook") == 200
        assert (await first.reply("/v1/completions", {**BODY, "model": "cook"}))["model"] == "cook"
        response = await first.post("/v1/completions", {**BODY, "model": "nobody"})
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        assert first.engine.streams == []


async def test_adapters_are_loaded_and_unloaded_at_the_router_that_is_asked() -> None:
    async with neighbours() as (first, second):
        assert await load(first, "poet") == 200
        assert (list(first.engine.model.loaded_adapters), list(second.engine.model.loaded_adapters)) == (["poet"], [])
        assert (await first.post("/v1/unload_lora_adapter", {"lora_name": "poet"})).status == 200


async def test_a_handed_over_request_for_an_adapter_without_a_readable_body_is_refused_as_any_other() -> None:
    async with neighbours() as (_, second):
        response = await second.post("/v1/completions", [], X_Caravan_Handed_Over="adapter")
        assert response.status == 400


async def test_what_a_router_keeps_is_answered_by_itself() -> None:
    async with neighbours() as (first, second):
        first.engine.model = CHAT_MODEL
        await first.reply("/v1/responses", {"input": "a", "max_output_tokens": 3})
        assert (len(first.engine.streams), len(second.engine.streams)) == (1, 0)

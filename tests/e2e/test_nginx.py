"""Behind nginx with deploy/nginx/caravan.conf, tokens arrive as they are sampled, and leaving clients are noticed."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.results import FinishReason
from caravan_testing.http_server import Service, serving
from caravan_testing.nginx import nginx
from caravan_testing.scripted_engine import MODEL, Pause, ScriptedEngine, word
from caravan_testing.waiting import eventually, in_time

pytestmark = pytest.mark.clients

STREAMS = [
    ("/generate_stream", {"inputs": "a"}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
    ("/api/generate", {"model": "any", "prompt": "a", "raw": True}),
]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    async with serving(ScriptedEngine(model=replace(MODEL, chat_template=template))) as running:
        yield running


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_each_token_arrives_before_the_next_is_sampled(
    service: Service, tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    engine = service.engine
    engine.script = lambda _: [
        word(" one"),
        Pause(),
        word(" two"),
        Pause(),
        word(" three"),
        Pause(),
        word(" four", finish=FinishReason.LENGTH),
    ]
    async with (
        nginx(tmp_path, service.url.removeprefix("http://")) as url,
        ClientSession() as client,
        in_time("all tokens have arrived"),
        client.post(f"{url}{path}", json=body) as response,
    ):
        assert response.status == 200
        assert "nginx" in response.headers["Server"]
        seen = b""
        for text in (b" one", b" two", b" three", b" four"):
            while text not in seen:
                seen += await response.content.readany()
            engine.resume.set()
            await asyncio.sleep(0)
            engine.resume.clear()
        await response.read()
    await eventually(service.is_idle)


@pytest.mark.parametrize("path", ["/metrics", "/health", "/admin/shards"])
async def test_what_is_not_for_clients_is_not_published(service: Service, tmp_path: Path, path: str) -> None:
    async with (
        nginx(tmp_path, service.url.removeprefix("http://")) as url,
        ClientSession() as client,
        client.get(f"{service.url}{path}") as direct,
        client.get(f"{url}{path}") as published,
    ):
        assert (direct.status, published.status) == (200, 404)


async def test_a_client_that_leaves_nginx_ends_its_generation(service: Service, tmp_path: Path) -> None:
    service.engine.script = lambda _: [word("a"), Pause()]
    async with nginx(tmp_path, service.url.removeprefix("http://")) as url, ClientSession() as client:
        response = await client.post(f"{url}/generate_stream", json={"inputs": "a"})
        assert (await response.content.readline()).startswith(b"data: {")
        assert not service.is_idle()
        response.close()
        await eventually(service.is_idle)

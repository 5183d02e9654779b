"""A server that ends: open connections get their replies, and one more each where a client may have sent a request."""

import asyncio

import pytest
from aiohttp import ClientConnectionError, ClientError, ClientSession, TCPConnector

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import FinishReason
from caravan_router.http.app import build_app
from caravan_router.http.server.listener import Listen, listening
from caravan_router.metrics.recorder import Metrics
from caravan_testing.http_server import events
from caravan_testing.scripted_engine import MODEL, Pause, ScriptedEngine, Step, word
from caravan_testing.waiting import DEADLINE_S, in_time

BODY = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
SCRIPT: list[Step] = [word("a"), Pause(), word("b", finish=FinishReason.LENGTH)]


def engine_with_metrics() -> tuple[ScriptedEngine, Metrics]:
    engine, metrics = ScriptedEngine(script=lambda _: SCRIPT), Metrics()
    metrics.of(MODEL.name)
    return engine, metrics


async def test_after_a_stream_that_began_before_the_end_its_connection_takes_one_more_request() -> None:
    engine, metrics = engine_with_metrics()
    limits = Limits()
    app = build_app(engine, limits, metrics)
    async with (
        listening(app, limits, Listen()) as port,
        ClientSession(port.url, connector=TCPConnector(limit=1)) as client,
    ):
        async with client.post("/generate_stream", json=BODY) as stream:
            await stream.content.readline()
            await port.stop_accepting()
            finishing = asyncio.create_task(port.finish(10 * DEADLINE_S))
            engine.resume.set()
            assert events("data: " + (await stream.text()).partition("data: ")[2])
        # No new connection is accepted, so this one is the same.
        async with client.post("/generate", json=BODY) as more:
            assert (more.status, more.headers["Connection"]) == (200, "close")
            assert (await more.json())["generated_text"] == "ab"
        with pytest.raises(ClientConnectionError):
            await client.post("/generate", json=BODY)
        async with in_time("the server ends once that has its reply"):
            await finishing


async def test_connections_without_a_request_are_closed_although_their_clients_keep_them() -> None:
    engine, metrics = engine_with_metrics()
    limits = Limits()
    async with listening(build_app(engine, limits, metrics), limits, Listen()) as port:
        host, _, number = port.url.removeprefix("http://").partition(":")
        used, unused = [await asyncio.open_connection(host, int(number)) for _ in range(2)]
        used[1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await used[0].readline() == b"HTTP/1.1 200 OK\r\n"
        async with in_time("the server ends"):
            await port.stop_accepting()
            await port.finish(10 * DEADLINE_S)
        for reader, writer in (used, unused):
            assert not (await reader.read()).startswith(b"HTTP")
            writer.close()


async def test_requests_that_do_not_end_are_cut_off_at_the_timeout() -> None:
    engine, metrics = engine_with_metrics()
    limits = Limits()
    async with (
        listening(build_app(engine, limits, metrics), limits, Listen()) as port,
        ClientSession(port.url) as client,
        client.post("/generate_stream", json=BODY) as stream,
    ):
        await stream.content.readline()
        await port.stop_accepting()
        await port.finish(0.2)
        with pytest.raises(ClientError):
            await stream.text()

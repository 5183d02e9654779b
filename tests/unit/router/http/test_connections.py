"""Limits on connections: their number, and the time for headers, bodies and replies."""

import asyncio
import time
from itertools import chain, repeat

import pytest

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import FinishReason
from caravan_testing.http_server import Service, serving
from caravan_testing.raw_http import HOST, exchange, port_of, post, replies_in
from caravan_testing.scripted_engine import Pause, ScriptedEngine, word
from caravan_testing.waiting import eventually

ONE_TOKEN = b'{"inputs":"a","parameters":{"max_new_tokens":1}}'


async def test_a_connection_without_a_complete_head_is_closed_in_time() -> None:
    async with serving(ScriptedEngine(), Limits(header_timeout_s=0.3)) as service:
        began = time.monotonic()
        slowly = chain([b"POST /generate HTTP/1.1\r\n"], repeat(b"X-A: b\r\n"))
        assert await exchange(service.url, slowly, pause_s=0.02) == b""
        assert time.monotonic() - began > 0.2
        assert await exchange(service.url, []) == b""


async def test_a_connection_may_be_idle_between_requests() -> None:
    async with serving(ScriptedEngine(), Limits(header_timeout_s=0.1)) as service:
        reader, writer = await asyncio.open_connection(HOST, port_of(service.url))
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.4)
        writer.close()


async def test_the_header_timeout_does_not_end_a_stream() -> None:
    engine = ScriptedEngine(script=lambda _: [word("a"), Pause()])
    async with serving(engine, Limits(header_timeout_s=0.1)) as service:
        response = await service.post("/generate_stream", {"inputs": "a"})
        await asyncio.sleep(0.4)
        assert not engine.streams[0].closed
        response.close()
        await eventually(service.is_idle)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_a_body_that_arrives_too_slowly_is_408(path: str) -> None:
    async with serving(ScriptedEngine(), Limits(body_timeout_s=0.3)) as service:
        whole = post(path, ONE_TOKEN)
        parts = [whole[:-40], *(bytes([byte]) for byte in whole[-40:])]
        (reply,) = replies_in(await exchange(service.url, parts, pause_s=0.05))
        assert reply.status == 408
        assert b"within 0.3 s" in reply.body
        assert service.is_idle()


async def test_a_body_may_arrive_byte_by_byte(service: Service) -> None:
    whole = post("/generate", ONE_TOKEN, "Connection: close")
    (reply,) = replies_in(await exchange(service.url, (bytes([byte]) for byte in whole)))
    assert (reply.status, reply.json()) == (200, {"generated_text": " w1"})


async def test_a_connection_over_the_limit_gets_503() -> None:
    async with serving(ScriptedEngine(), Limits(max_connections=2)) as service:
        held = [await asyncio.open_connection(HOST, port_of(service.url)) for _ in range(2)]
        # Each has been accepted once it has been answered.
        for reader, writer in held:
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        (reply,) = replies_in(await exchange(service.url, []))
        assert reply.status == 503
        assert b"Retry-After: 1" in reply.headers
        assert reply.json() == {"error": "Too many connections are open. Allowed: 2", "error_type": "overloaded"}
        for _, writer in held:
            writer.close()

        async def status() -> int:
            return (await service.client.get("/health")).status

        await eventually(status, "a connection is free", lambda found: found == 200)


async def test_a_whole_reply_that_is_not_read_is_dropped() -> None:
    engine = ScriptedEngine(script=lambda _: [word("x" * 20_000_000), word("", finish=FinishReason.LENGTH)])
    async with serving(engine, Limits(slow_client_timeout_s=0.3)) as service:
        reader, writer = await asyncio.open_connection(HOST, port_of(service.url))
        writer.write(post("/generate", b'{"inputs":"a"}'))
        await reader.readexactly(1)
        # The permit is free at once, the reply's memory after the timeout.
        assert service.is_idle()
        await asyncio.sleep(1)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(20_000_000)
        writer.close()


async def test_bytes_that_are_not_http_get_a_json_error(service: Service) -> None:
    for raw in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET  / HTTP/1.1\r\n\r\n",
    ):
        (reply,) = replies_in(await exchange(service.url, [raw]))
        assert reply.status == 400, raw
        assert reply.json()["error_type"] == "validation"
        assert str(reply.json()["error"]).startswith("The request is not valid HTTP/1.1: ")


@pytest.mark.parametrize("coding", ["br", "zstd", "snappy"])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_coding_that_cannot_be_read_is_named_in_the_form_of_the_route(
    service: Service, path: str, coding: str
) -> None:
    async with service.client.post(
        path, data=b"x", headers={"Content-Encoding": coding, "Content-Type": "application/json"}
    ) as response:
        assert response.status == 415
        body = await response.json()
    error = body["error"]["message"] if path == "/v1/completions" else body["error"]
    assert "`Content-Encoding` must be `gzip` or `deflate`" in error
    assert coding in error

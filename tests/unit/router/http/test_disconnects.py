"""Clients that disconnect at awkward moments. Nothing failed then, so the log has no errors."""

import asyncio
import gc
import logging
import socket
import struct
from collections.abc import Iterator

import pytest
from aiohttp import web

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import FinishReason
from caravan_router.http.app import build_app
from caravan_router.http.server.listener import Listen, listening
from caravan_router.metrics.recorder import Metrics
from caravan_testing.http_server import serving
from caravan_testing.raw_http import HOST, exchange, port_of, post
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine, word
from caravan_testing.waiting import eventually

STREAMS = [
    ("/generate_stream", b'{"inputs":"a"}'),
    ("/v1/completions", b'{"prompt":"a","stream":true,"n":2}'),
    ("/v1/responses", b'{"input":"a","stream":true}'),
    ("/v1/messages", b'{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"stream":true}'),
    ("/api/generate", b'{"model":"scripted","prompt":"a"}'),
]
# Lets a socket reset its connection when it is closed.
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(autouse=True)
def calm(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    yield
    # Errors of tasks that nobody awaits are logged when they are collected.
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert not [record for record in records if record.exc_info or record.levelno > logging.WARNING]


def _statuses(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.__dict__["status"] for record in caplog.records if record.name == "caravan.access"]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_the_connection_closes_just_before_the_headers_of_a_stream(
    path: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop has read the end of the connection, and has not cancelled the handler yet."""
    app = build_app(ScriptedEngine(model=CHAT_MODEL), Limits(), Metrics())

    async def close(request: web.Request, _: web.StreamResponse) -> None:
        assert request.transport is not None
        request.transport.close()

    app.on_response_prepare.append(close)
    async with listening(app, Limits(), Listen()) as port:
        assert await exchange(port.url, [post(path, body)]) == b""
        await eventually(lambda: _statuses(caplog) == [499])


@pytest.mark.parametrize(("path", "body"), [*STREAMS, ("/generate", b'{"inputs":"a"}')])
async def test_the_connection_is_reset_while_the_server_waits_for_the_client_to_read(path: str, body: bytes) -> None:
    large = [word("x" * 20_000_000), word("", finish=FinishReason.LENGTH)]
    engine = ScriptedEngine(model=CHAT_MODEL, script=lambda _: large)
    async with serving(engine) as service:
        _, writer = await asyncio.open_connection(HOST, port_of(service.url))
        writer.write(post(path, body))
        await eventually(lambda: bool(engine.streams) and engine.streams[0].sent > 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
        await eventually(service.is_idle)
        assert (await service.client.get("/health")).status == 200

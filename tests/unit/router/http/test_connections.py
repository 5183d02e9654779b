"""Connections: how many, their clients, bodies and TLS, and the server's end."""

import asyncio
import gzip
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import trustme
from aiohttp import ClientConnectionError, ClientError, ClientResponse, ClientSession, TCPConnector
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from caravan_dialects.api.errors import BodiesTooLargeError, DecodedBodyTooLargeError
from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import FinishReason
from caravan_proto.tls import TlsFiles
from caravan_router.app import run_router
from caravan_router.config import RouterConfig
from caravan_router.http.app import build_app
from caravan_router.http.server.body import BodyRoom
from caravan_router.http.server.listener import Listen, Tls, listening
from caravan_router.metrics.recorder import Metrics
from caravan_testing.http_server import Service, events, keys, serving
from caravan_testing.raw_http import HOST, exchange, port_of, post, replies_in
from caravan_testing.scripted_engine import EOS_TOKEN, MODEL, Pause, ScriptedEngine, Step, word
from caravan_testing.waiting import DEADLINE_S, eventually, in_time

ONE_TOKEN = b'{"inputs":"a","parameters":{"max_new_tokens":1}}'
JSON = {"Content-Type": "application/json"}
GOOD = {"prompt": "hi", "max_tokens": 1}
BODY = {"inputs": "a", "parameters": {"max_new_tokens": 2}}


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


@pytest.fixture
def hub(service: Service) -> InferenceClient:
    return InferenceClient(model=service.url, timeout=DEADLINE_S)


@pytest.fixture
def openai_client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


async def test_hub_text(hub: InferenceClient) -> None:
    assert await asyncio.to_thread(hub.text_generation, "hi", max_new_tokens=3) == " w1 w2 w3"


async def test_hub_details(hub: InferenceClient) -> None:
    output: Any = await asyncio.to_thread(
        hub.text_generation, "hi", details=True, max_new_tokens=2, top_n_tokens=1, do_sample=True, seed=7
    )
    assert output.generated_text == " w1 w2"
    assert (output.details.finish_reason, output.details.seed) == ("length", 7)
    assert [token.text for token in output.details.tokens] == [" w1", " w2"]
    assert len(output.details.top_tokens) == 2


async def test_hub_stream(hub: InferenceClient, service: Service) -> None:
    service.engine.script = lambda _: [word("a"), word("b"), EOS_TOKEN]

    def read() -> list[str]:
        return list(hub.text_generation("hi", stream=True))

    # As in TGI, a control token is an event; this client returns the texts of all events.
    assert await asyncio.to_thread(read) == ["a", "b", "</s>"]


async def test_hub_stream_with_details(hub: InferenceClient) -> None:
    def read() -> list[Any]:
        return list(hub.text_generation("hi", stream=True, details=True, max_new_tokens=2, return_full_text=True))

    first, last = await asyncio.to_thread(read)
    assert (first.index, first.token.text, first.details) == (1, " w1", None)
    assert last.generated_text == "hi w1 w2"
    assert last.details.input_length == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_hub_raises_a_validation_error(hub: InferenceClient, stream: bool) -> None:
    def ask() -> None:
        list(hub.text_generation("hi", temperature=-1.0, stream=stream))

    with pytest.raises(ValidationError, match="temperature"):
        await asyncio.to_thread(ask)


@pytest.mark.parametrize("stream", [False, True])
async def test_hub_raises_an_overload_error(stream: bool) -> None:
    engine = ScriptedEngine(script=lambda _: [Pause()])
    async with serving(engine, Limits(max_concurrent_requests=0)) as service:
        hub = InferenceClient(model=service.url, timeout=DEADLINE_S)
        with pytest.raises(OverloadedError):
            await asyncio.to_thread(lambda: list(hub.text_generation("hi", stream=stream)))


async def test_openai_completion(openai_client: openai.OpenAI) -> None:
    reply = await asyncio.to_thread(
        openai_client.completions.create, model="any", prompt=["a", "b"], max_tokens=2, logprobs=1, stop="zz"
    )
    assert [(choice.index, choice.text, choice.finish_reason) for choice in reply.choices] == [
        (0, " w1 w2", "length"),
        (1, " w1 w2", "length"),
    ]
    assert reply.usage is not None
    assert reply.usage.total_tokens == 8
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.tokens == [" w1", " w2"]


async def test_openai_stream(openai_client: openai.OpenAI) -> None:
    def read() -> list[Any]:
        options: Any = {"include_usage": True}
        return list(
            openai_client.completions.create(
                model="any", prompt="a", max_tokens=2, stream=True, stream_options=options, extra_body={"min_p": 0.1}
            )
        )

    first, second, usage = await asyncio.to_thread(read)
    assert first.choices[0].text + second.choices[0].text == " w1 w2"
    assert second.choices[0].finish_reason == "length"
    assert usage.usage.completion_tokens == 2


async def test_openai_errors(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="`top_p` must be") as caught:
        await asyncio.to_thread(openai_client.completions.create, model="any", prompt="a", top_p=2)
    assert caught.value.param == "top_p"


async def test_openai_models(openai_client: openai.OpenAI) -> None:
    models = await asyncio.to_thread(lambda: list(openai_client.models.list()))
    assert [model.id for model in models] == ["scripted", "pirate"]


def test_each_client_gets_as_much_as_it_leaves_free() -> None:
    room = BodyRoom(1200)
    with ExitStack() as held:
        first, second, third = (held.enter_context(room.share(name)) for name in ("ann", "bob", "eve"))
        first.grow(600)
        with pytest.raises(DecodedBodyTooLargeError):
            first.grow(1)
        with room.share("ann") as more, pytest.raises(BodiesTooLargeError):
            more.grow(1)
        second.grow(300)
        third.grow(150)
        assert room.total == 1050
        first.shrink(600)
        second.grow(225)
        assert room.total == 675
    assert room.total == 0


async def test_clients_that_send_and_stop_take_no_more_than_the_limit() -> None:
    """Uploads of one key stop short of their end. Those beyond the limit are refused, another key's request is not."""
    limits = Limits(payload_limit=1_000_000, max_bodies_bytes=3_000_000)
    enough = asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        yield b'{"prompt":"' + b"a" * 400_000
        await enough.wait()
        yield b'"}'

    async with serving(ScriptedEngine(), limits, keys("ann", "bob")) as service:

        async def send() -> ClientResponse:
            return await service.client.post(
                "/v1/completions", data=upload(), headers={**JSON, "Authorization": "Bearer ann"}
            )

        async with AsyncExitStack() as ending:
            sending = [asyncio.create_task(send()) for _ in range(10)]
            ending.callback(enough.set)
            async with in_time("the uploads beyond the limit are refused"):
                refused = [await one for _, one in zip(range(7), asyncio.as_completed(sending), strict=False)]
            assert [response.status for response in refused] == [503] * 7
            assert refused[0].headers["Retry-After"] == "1"
            assert "3000000 bytes" in (await refused[0].json())["error"]["message"]
            answered = await service.post("/v1/completions", GOOD, Authorization="Bearer bob")
            assert answered.status == 200, await answered.text()
        await asyncio.gather(*sending)
        # What the others held is free again.
        answered = await service.post("/v1/completions", {**GOOD, "prompt": "a" * 600_000}, Authorization="Bearer ann")
        assert answered.status == 400, await answered.text()
        assert "context_length_exceeded" in await answered.text()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        # Bytes after decompression count.
        (b'{"prompt":"' + b"a" * 4_500_000 + b'"}', 413),
        # Short values take much more memory than their text.
        (b'{"prompt":"a","metadata":[' + b"{}," * 20_000 + b"{}]}", 413),
        (b'{"prompt":"a","metadata":[' + b'{"b":1},' * 14_000 + b"0]}", 413),
        # Their marks inside a string take no memory.
        (msgspec.json.encode({"prompt": "hi", "max_tokens": 1, "user": "{},[]" * 100_000}), 200),
        (msgspec.json.encode({"prompt": "hi", "max_tokens": 1, "user": '\\"{},' * 100_000}), 200),
        # One wide character makes its whole string wide, and no other one.
        ('{"prompt":"a","user":"☃🐫'.encode() + b"a" * 1_400_000 + b'"}', 413),
        (b'{"prompt":"a","user":"\\ud83d\\udc2b' + b"a" * 1_400_000 + b'"}', 413),
        (b'{"max_tokens":1,"prompt":"hi","user":"' + b"a" * 1_000_000 + '","stop":"🐫"}'.encode(), 200),
    ],
)
async def test_decoded_values_count(engine: ScriptedEngine, body: bytes, status: int) -> None:
    limits = Limits(payload_limit=5_000_000, max_bodies_bytes=8_000_000)
    async with serving(engine, limits) as service:
        headers = {**JSON, "Content-Encoding": "gzip"}
        response = await service.client.post("/v1/completions", data=gzip.compress(body), headers=headers)
        text = await response.text()
        assert response.status == status, text
        assert status == 200 or "may take at most 4000000 bytes" in text


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


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def write_certificate(authority: trustme.CA, folder: Path) -> tuple[str, str]:
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return str(chain), str(key)


@asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[str]:
    """Run the router as the program does, with a shard that cannot be reached; yield its URL."""
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    running = asyncio.create_task(run_router(config, stop, lambda _engine, url: urls.put_nowait(url)))
    try:
        async with in_time("the router listens"):
            url = await urls.get()
        yield url
    finally:
        stop.set()
        await running


async def serial_of(url: str, context: ssl.SSLContext) -> str:
    """Return the serial number of the server's certificate."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return str(certificate["serialNumber"])


async def test_a_stream_over_https(authority: trustme.CA, tmp_path: Path) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    tls = await asyncio.to_thread(Tls, TlsFiles(prefix="--ssl-", certfile=chain, keyfile=key))
    limits = Limits()
    async with (
        listening(build_app(ScriptedEngine(), limits, Metrics()), limits, Listen(tls=tls.context)) as port,
        ClientSession(connector=TCPConnector(ssl=trusting(authority))) as client,
    ):
        url = port.url
        assert url.startswith("https://127.0.0.1:")
        body = {"inputs": "a", "parameters": {"max_new_tokens": 3}}
        async with client.post(f"{url}/generate_stream", json=body) as response:
            assert [event["token"]["text"] for event in events(await response.text())] == [" w1", " w2", " w3"]


async def test_sighup_reloads_the_certificate_and_a_broken_one_changes_nothing(
    authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    config = RouterConfig(port=0, shard=("127.0.0.1:1",), ssl_certfile=chain, ssl_keyfile=key)
    trust = trusting(authority)
    async with router(config) as url:
        first = await serial_of(url, trust)
        await asyncio.to_thread(Path(key).write_bytes, b"no key")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: "certificate not reloaded" in caplog.text, "the broken certificate is logged")
        assert await serial_of(url, trust) == first
        await asyncio.to_thread(write_certificate, authority, tmp_path)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: serial_of(url, trust), "another certificate", lambda serial: serial != first)


async def test_a_renewed_certificate_is_served_without_a_signal(authority: trustme.CA, tmp_path: Path) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    config = RouterConfig(port=0, shard=("127.0.0.1:1",), ssl_certfile=chain, ssl_keyfile=key)
    trust = trusting(authority)
    async with router(config) as url:
        first = await serial_of(url, trust)
        await asyncio.to_thread(write_certificate, authority, tmp_path)
        await eventually(lambda: serial_of(url, trust), "another certificate", lambda serial: serial != first)


async def test_ssl_ca_certs_requires_client_certificates(authority: trustme.CA, tmp_path: Path) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    named = tmp_path / "authorities.pem"
    await asyncio.to_thread(authority.cert_pem.write_to_path, named)
    config = RouterConfig(port=0, shard=("127.0.0.1:1",), ssl_certfile=chain, ssl_keyfile=key, ssl_ca_certs=str(named))
    known, unknown = trusting(authority), trusting(authority)
    await asyncio.to_thread(authority.issue_cert("a-client").configure_cert, known)
    async with router(config) as url, ClientSession(url) as client:
        async with client.get("/health", ssl=known) as response:
            assert response.status == 503
        with pytest.raises(ClientError):
            await client.get("/health", ssl=unknown)


def test_a_missing_certificate_is_a_startup_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "caravan_serve", "router", "--shard", "127.0.0.1:1", "--port", "0"]
    missing = tmp_path / "none.pem"
    done = subprocess.run([*command, "--ssl-certfile", missing], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: --ssl-certfile: {missing}: [Errno 2]" in done.stderr
    done = subprocess.run([*command, "--ssl-keyfile", missing], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile" in done.stderr

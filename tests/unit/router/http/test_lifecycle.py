"""A request from its arrival to its end: deadlines, clients that leave, and what is released."""

import asyncio
import gc
import logging
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import FinishReason
from caravan_router.http.app import build_app
from caravan_router.http.server.listener import Listen, listening
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.core.errors import DeadlineError, GenerationError
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, serving
from caravan_testing.raw_http import HOST, exchange, port_of, post
from caravan_testing.scripted_engine import CHAT_MODEL, Pause, ScriptedEngine, Step, word
from caravan_testing.waiting import eventually, in_time

UPLOAD_S = 0.3
# Timers may fire a few milliseconds early.
LEAST_S = 0.9 * UPLOAD_S
MESSAGES = [{"role": "user", "content": "hi"}]
STREAMS = [
    ("/generate_stream", b'{"inputs":"a"}'),
    ("/v1/completions", b'{"prompt":"a","stream":true,"n":2}'),
    ("/v1/responses", b'{"input":"a","stream":true}'),
    ("/v1/messages", b'{"max_tokens":5,"messages":[{"role":"user","content":"a"}],"stream":true}'),
    ("/api/generate", b'{"model":"scripted","prompt":"a"}'),
]
# Lets a socket reset its connection when it is closed.
RESET = struct.pack("ii", 1, 0)
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "a"}),
    ("/generate_stream", {"inputs": "a"}),
    ("/", {"inputs": "a", "stream": True}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "best_of": 3}),
    ("/v1/completions", {"prompt": "a", "n": 3, "stream": True}),
    ("/generate", {"inputs": "a", "parameters": {"best_of": 3, "do_sample": True}}),
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hi"}),
        ("/invocations", {"inputs": "hi"}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/api/generate", {"model": "m", "prompt": "hi", "raw": True, "stream": False}),
        ("/vertex", {"instances": [{"inputs": "hi"}]}),
    ],
)
async def test_times_include_the_upload(service: Service, path: str, body: dict[str, Any]) -> None:
    data = msgspec.json.encode(body)

    async def slowly() -> Any:
        yield data[:5]
        await asyncio.sleep(UPLOAD_S)
        yield data[5:]

    headers = {"Content-Type": "application/json"}
    # The client waits for "100 Continue", so the head has arrived when the upload starts.
    response = await service.client.post(path, data=slowly(), headers=headers, expect100=True)
    assert response.status == 200, await response.text()
    reply = await response.json()
    assert int(response.headers["x-total-time"]) >= LEAST_S * 1000
    assert await service.sample("caravan_time_to_first_token_seconds_sum") >= LEAST_S
    if path.startswith("/api/"):
        assert reply["total_duration"] >= LEAST_S * 1e9


LATE = DeadlineError("the request did not end within its timeout")


async def reply(path: str, body: dict[str, Any], *steps: Step) -> tuple[int, Any]:
    async with serving(ScriptedEngine(script=lambda _: steps, model=CHAT_MODEL)) as service:
        response = await service.post(path, body)
        assert service.is_idle()
        return response.status, await response.json()


async def test_generate_returns_the_text_so_far() -> None:
    body = {"inputs": "hi", "parameters": {"details": True}}
    status, answer = await reply("/generate", body, word("a", logprob=-1.0), word("b", logprob=-1.0), LATE)
    assert (status, answer["generated_text"]) == (200, "ab")
    assert (answer["details"]["finish_reason"], answer["details"]["generated_tokens"]) == ("length", 2)


async def test_completions_return_the_text_so_far() -> None:
    status, answer = await reply("/v1/completions", {"prompt": "hi", "stop": "bx"}, word("a"), word("b"), LATE)
    [choice] = answer["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "ab", "length")
    assert answer["usage"]["completion_tokens"] == 2


async def test_chat_returns_the_text_so_far() -> None:
    status, answer = await reply("/v1/chat/completions", {"messages": MESSAGES}, word("a"), LATE)
    [choice] = answer["choices"]
    assert (status, choice["message"]["content"], choice["finish_reason"]) == (200, "a", "length")


@pytest.mark.parametrize(("path", "body"), [("/api/generate", {"prompt": "hi"}), ("/api/chat", {"messages": MESSAGES})])
async def test_ollama_returns_the_text_so_far(path: str, body: dict[str, Any]) -> None:
    status, answer = await reply(path, {"model": "m", "stream": False, **body}, word("a"), LATE)
    assert (status, answer["done"], answer["done_reason"], answer["eval_count"]) == (200, True, "length", 1)
    assert (answer["response"] if "response" in answer else answer["message"]["content"]) == "a"


async def test_messages_return_the_text_so_far_with_what_was_held_back() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "stop_sequences": ["bx"]}
    status, answer = await reply("/v1/messages", body, word("a"), word("b"), LATE)
    assert (status, answer["content"][0]["text"], answer["stop_reason"]) == (200, "ab", "max_tokens")


async def test_a_response_has_the_text_so_far() -> None:
    status, answer = await reply("/v1/responses", {"input": "hi"}, word("a"), LATE)
    assert (status, answer["status"], answer["incomplete_details"]) == (
        200,
        "incomplete",
        {"reason": "deadline_exceeded"},
    )
    assert answer["output"][-1]["content"][0]["text"] == "a"


async def test_vertex_cannot_mark_a_prediction_as_incomplete_and_returns_an_error() -> None:
    status, answer = await reply("/vertex", {"instances": [{"inputs": "hi"}]}, word("a"), LATE)
    assert (status, answer["error_type"]) == (504, "deadline_exceeded")


async def test_choices_without_tokens_are_empty_if_another_choice_has_tokens(service: Service) -> None:
    def script(_: GenerationSpec) -> list[Step]:
        return [word("a"), LATE] if not service.engine.streams else [LATE]

    service.engine.script = script
    answer = await (await service.post("/v1/completions", {"prompt": "hi", "n": 2})).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        ("a", "length"),
        ("", "length"),
    ]


async def test_missing_prompt_logprobs_are_an_error() -> None:
    body = {"prompt": ["hi", "ho"], "echo": True, "logprobs": 1}
    status, answer = await reply("/v1/completions", body, LATE)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


@pytest.fixture
def calm(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    yield
    # Errors of tasks that nobody awaits are logged when they are collected.
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert not [record for record in records if record.exc_info or record.levelno > logging.WARNING]


def _statuses(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.__dict__["status"] for record in caplog.records if record.name == "caravan.access"]


@pytest.mark.usefixtures("calm")
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


@pytest.mark.usefixtures("calm")
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


def generations_of(body: dict[str, Any]) -> int:
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    n: int = body.get("n") or 1
    candidates: int = body.get("best_of") or body.get("parameters", {}).get("best_of") or n
    return prompts * candidates


async def send(service: Service, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Send a request on a new connection whose reply is never read."""
    data = msgspec.json.encode(body)
    _, writer = await asyncio.open_connection("127.0.0.1", int(service.url.rpartition(":")[2]))
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
    return writer


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("tokens_before", [0, 2], ids=["before the first token", "between tokens"])
async def test_a_client_disconnects_during_generation(
    service: Service, path: str, body: dict[str, Any], tokens_before: int
) -> None:
    engine = service.engine
    generations = generations_of(body)
    engine.script = lambda _: [*[word("a")] * tokens_before, Pause()]
    writer = await send(service, path, body)
    await eventually(
        lambda: len(engine.streams) == generations and all(s.sent == tokens_before for s in engine.streams)
    )
    assert not any(stream.closed for stream in engine.streams)
    assert service.free_permits == service.limits.max_concurrent_requests - generations
    writer.close()
    await eventually(service.is_idle)
    assert await service.sample('tgi_request_failure{err="dropped"}') == generations


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_client_that_closes_its_side_only_has_left(service: Service, path: str) -> None:
    # Else a client that gives up a request without a stream would hold its place until the whole reply is written.
    service.engine.script = lambda _: [Pause()]
    writer = await send(service, path, {"inputs": "a"})
    await eventually(lambda: bool(service.engine.streams))
    writer.write_eof()
    await eventually(service.is_idle)
    writer.close()


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_client_disconnects_during_tokenization(service: Service, path: str, body: dict[str, Any]) -> None:
    service.engine.tokenizing = asyncio.Event()
    writer = await send(service, path, body)
    await eventually(lambda: service.free_permits == service.limits.max_concurrent_requests - generations_of(body))
    writer.close()
    await eventually(service.is_idle)
    assert not service.engine.streams


@pytest.mark.parametrize(("path", "status"), [("/generate", 429), ("/generate_stream", 429), ("/", 429)])
async def test_a_request_over_the_limit_is_refused_before_validation(path: str, status: int) -> None:
    engine = ScriptedEngine(script=lambda _: [Pause()])
    async with serving(engine, Limits(max_concurrent_requests=1)) as service:
        writer = await send(service, "/generate", {"inputs": "a"})
        await eventually(lambda: bool(engine.streams))
        response = await service.post(path, {"inputs": ""})
        assert response.status == status
        assert response.headers["Retry-After"] == "1"
        assert await response.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert await service.sample('tgi_request_failure{err="overloaded"}') == 1
        writer.close()
        await eventually(service.is_idle)


async def test_a_list_of_prompts_takes_all_of_its_permits_or_none() -> None:
    async with serving(ScriptedEngine(), Limits(max_concurrent_requests=2)) as service:
        response = await service.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        assert response.status == 429
        assert (await response.json())["error"]["type"] == "rate_limit_error"
        assert service.free_permits == 2
        assert (await service.post("/v1/completions", {"prompt": ["a", "b"]})).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "n": 2, "best_of": 3}),
        ("/v1/completions", {"prompt": "a", "n": 3, "stream": True}),
        ("/v1/chat/completions", {"messages": [], "prompt_token_ids": [1], "n": 2, "best_of": 3}),
        ("/generate", {"inputs": "a", "parameters": {"best_of": 3, "do_sample": True}}),
    ],
)
async def test_an_error_of_one_candidate_ends_all_candidates(service: Service, path: str, body: dict[str, Any]) -> None:
    engine = service.engine

    def script(_: GenerationSpec) -> list[Step]:
        # The second candidate fails; the others would never end.
        return [word("a", logprob=-1.0), GenerationError("gone") if len(engine.streams) == 1 else Pause()]

    engine.script = script
    response = await service.post(path, body)
    assert "gone" in await response.text()
    assert len(engine.streams) == 3
    assert service.is_idle()
    assert await service.sample('tgi_request_failure{err="generation"}') == 3


async def test_each_candidate_takes_a_permit() -> None:
    async with serving(ScriptedEngine(), Limits(max_concurrent_requests=3)) as service:
        assert (await service.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})).status == 429
        assert (await service.post("/v1/completions", {"prompt": "a", "best_of": 4})).status == 429
        assert (await service.post("/v1/completions", {"prompt": "a", "n": 3})).status == 200
        four = {"inputs": "a", "parameters": {"best_of": 4, "do_sample": True}}
        assert (await service.post("/generate", four)).status == 429
        # An invalid ``best_of`` is a validation error and takes one permit.
        far = {"inputs": "a", "parameters": {"best_of": 10**9, "do_sample": True}}
        assert (await service.post("/generate", far)).status == 422
        assert service.is_idle()


async def test_a_client_that_does_not_read_is_disconnected_and_blocks_no_other() -> None:
    engine = ScriptedEngine(script=lambda _: [word("x" * 100_000)] * 1000)
    async with serving(engine, Limits(slow_client_timeout_s=0.2)) as service:
        writer = await send(service, "/generate_stream", {"inputs": "a"})
        await eventually(lambda: bool(engine.streams) and engine.streams[0].sent > 3)
        blocked, engine.script = engine.streams[0], lambda _: [word("y")] * 3
        response = await service.post("/generate_stream", {"inputs": "a"})
        assert (await response.text()).count("data: {") == 4
        assert not blocked.closed
        await eventually(service.is_idle)
        assert blocked.sent < 1000
        writer.close()


async def test_a_silent_stream_is_kept_alive() -> None:
    engine = ScriptedEngine(script=lambda _: [word("a"), Pause()])
    async with serving(engine, Limits(keep_alive_s=0.05)) as service:
        response = await service.post("/generate_stream", {"inputs": "a"})
        assert (await response.content.readline()).startswith(b"data: {")
        assert [await response.content.readline() for _ in range(5)] == [b"\n", b":\n", b"\n", b":\n", b"\n"]
        response.close()
        await eventually(service.is_idle)


async def test_headers_are_sent_before_the_first_token(service: Service) -> None:
    service.engine.script = lambda _: [Pause()]
    async with in_time("the head of the response"):
        response = await service.post("/generate_stream", {"inputs": "a"})
    assert response.status == 200
    response.close()
    await eventually(service.is_idle)

"""However a request ends, its streams are closed, its permits are released, and metrics count it."""

import asyncio
from typing import Any

import msgspec
import pytest

from caravan_dialects.api.limits import Limits
from caravan_scheduler.core.errors import GenerationError
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import Pause, ScriptedEngine, Step, word
from caravan_testing.waiting import eventually, in_time

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

"""``/v1/requests``: a key lists its requests in progress and may abort them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import openai
import pytest
from aiohttp import ClientResponse

from caravan_dialects.api.errors import AbortedError
from caravan_dialects.api.generation.in_progress import RequestInProgress
from caravan_dialects.api.limits import Limits
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_scheduler.core.errors import GenerationError
from caravan_scheduler.core.generation import GenerationSpec, GenerationState, Tenant
from caravan_scheduler.core.recomputed import Part, Reason, Recomputed
from caravan_testing.http_server import Service, events, serving
from caravan_testing.scripted_engine import CHAT_MODEL, EOS_TOKEN, Pause, ScriptedEngine, Step, word
from caravan_testing.waiting import eventually

MESSAGES = [{"role": "user", "content": "hi"}]
MESSAGE = "The request was aborted by `DELETE /v1/requests/{id}`"
TGIS = {"error": MESSAGE, "error_type": "aborted"}
OPENAIS = {"error": {"message": MESSAGE, "type": "invalid_request_error", "param": None, "code": "aborted"}}

# Route, body, and the error that the client gets when the request is aborted.
WHOLE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/generate", {"inputs": "a"}, TGIS),
    ("/", {"inputs": "a"}, TGIS),
    ("/v1/completions", {"prompt": "a"}, OPENAIS),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, OPENAIS),
    ("/v1/chat/completions", {"messages": MESSAGES}, OPENAIS),
    ("/api/generate", {"model": "m", "prompt": "a", "stream": False}, TGIS),
    ("/api/chat", {"model": "m", "messages": MESSAGES, "stream": False}, TGIS),
    ("/invocations", {"inputs": "a"}, TGIS),
    ("/vertex", {"instances": [{"inputs": "a"}, {"messages": MESSAGES}]}, TGIS),
]
STREAMED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/generate_stream", {"inputs": "a"}, TGIS),
    ("/", {"inputs": "a", "stream": True}, TGIS),
    ("/v1/completions", {"prompt": "a", "n": 2, "stream": True}, OPENAIS),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, OPENAIS),
]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(script=lambda _: [word("a", logprob=-1.0), Pause()], model=CHAT_MODEL)


async def listed(service: Service, **headers: str) -> list[dict[str, Any]]:
    response = await service.client.get("/v1/requests", headers=headers)
    assert response.status == 200
    answer = await response.json()
    assert answer["object"] == "list"
    data: list[dict[str, Any]] = answer["data"]
    return data


async def delete(service: Service, request_id: str, **headers: str) -> ClientResponse:
    return await service.client.delete(f"/v1/requests/{request_id}", headers=headers)


@asynccontextmanager
async def posted(service: Service, path: str, body: Any, **headers: str) -> AsyncIterator[asyncio.Task[ClientResponse]]:
    """Run a request in a task for the duration of the block."""
    task = asyncio.create_task(service.post(path, body, **headers))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_idle_router_lists_no_requests(service: Service) -> None:
    assert await listed(service) == []


async def test_a_request_is_listed_from_arrival_to_end(service: Service) -> None:
    engine = service.engine
    engine.tokenizing = asyncio.Event()
    before = time.time()
    body = {"inputs": "ab", "priority": 3, "session_id": "mine", "parameters": {"adapter_id": "pirate"}}
    async with posted(service, "/generate", body, X_Request_Id="me") as reply:
        await eventually(lambda: service.free_permits < service.limits.max_concurrent_requests)
        [entry] = await listed(service)
        assert before - 0.01 <= entry.pop("arrived") <= time.time()
        assert entry == {
            "id": "me",
            "object": "request",
            "route": "/generate",
            "model": None,
            "state": "queued",
            "priority": None,
            "session": None,
            "prompt_tokens": None,
            "generated_tokens": 0,
            "generations": [],
        }
        engine.script = lambda _: [Pause(), word("a"), Pause(), EOS_TOKEN]
        engine.tokenizing.set()
        await eventually(lambda: bool(engine.streams))
        for state in (GenerationState.QUEUED, GenerationState.PREFILLING, GenerationState.SWAPPED):
            engine.state_before_tokens = state
            [entry] = await listed(service)
            assert entry["state"] == state.value
        engine.resume.set()
        engine.resume.clear()
        await eventually(lambda: engine.streams[0].sent == 1)
        [entry] = await listed(service)
        assert before - 0.01 <= entry.pop("arrived") <= time.time()
        assert entry == {
            "id": "me",
            "object": "request",
            "route": "/generate",
            "model": "pirate",
            "state": "running",
            "priority": 3,
            "session": "mine",
            "prompt_tokens": 3,
            "generated_tokens": 1,
            "generations": [{"state": "running", "prompt_tokens": 3, "generated_tokens": 1, "cache": None}],
        }
        engine.resume.set()
        assert (await reply).status == 200
    assert await listed(service) == []


@pytest.mark.parametrize(("path", "body", "_error"), WHOLE)
async def test_every_generating_route_is_listed(
    service: Service, path: str, body: dict[str, Any], _error: dict[str, Any]
) -> None:
    async with posted(service, path, body):
        await eventually(lambda: bool(service.engine.streams) and all(stream.sent for stream in service.engine.streams))
        [entry] = await listed(service)
        assert (entry["route"], entry["model"], entry["state"]) == (path, "scripted", "running")
        assert len(entry["id"]) == 32
        assert len(entry["generations"]) == len(service.engine.streams)
        assert entry["generated_tokens"] == len(service.engine.streams)
    await eventually(service.is_idle)


async def test_a_request_that_has_started_tells_why_its_prompt_is_computed(service: Service) -> None:
    parts = (Part(Reason.EVICTED, 1, 3), Part(Reason.DIFFERS, 4, 5))
    service.engine.recomputed = Recomputed(parts, common=4, is_exact=False, was_moved=True)
    service.engine.cached_tokens = lambda _: 1
    async with posted(service, "/generate", {"inputs": "abcdefgh"}):
        await eventually(lambda: bool(service.engine.streams) and service.engine.streams[0].sent == 1)
        [entry] = await listed(service)
    assert entry["generations"][0]["cache"] == {
        "cached_tokens": 1,
        "fetched": True,
        "first_difference": {"token": 4, "exact": False},
        "computed": [
            {"reason": "evicted", "start": 1, "tokens": 3},
            {"reason": "differs", "start": 4, "tokens": 5},
        ],
    }
    await eventually(service.is_idle)


async def test_a_request_lists_its_generations(service: Service) -> None:
    engine = service.engine

    def script(_: GenerationSpec) -> list[Step]:
        scripts: list[list[Step]] = [[word("a"), EOS_TOKEN], [word("a"), Pause()], [Pause()]]
        return scripts[len(engine.streams)]

    engine.script = script
    async with posted(service, "/v1/completions", {"prompt": "a", "n": 3}):
        await eventually(lambda: len(engine.streams) == 3 and engine.streams[0].closed and engine.streams[1].sent == 1)
        [entry] = await listed(service)
        assert entry["generations"] == [
            {"state": "ended", "prompt_tokens": 2, "generated_tokens": 2, "cache": None},
            {"state": "running", "prompt_tokens": 2, "generated_tokens": 1, "cache": None},
            {"state": "queued", "prompt_tokens": 2, "generated_tokens": 0, "cache": None},
        ]
        assert (entry["state"], entry["prompt_tokens"], entry["generated_tokens"]) == ("running", 2, 3)
    await eventually(service.is_idle)


@pytest.mark.parametrize(("path", "body", "error"), WHOLE)
async def test_an_aborted_request_gets_an_error_of_its_dialect(
    service: Service, path: str, body: dict[str, Any], error: dict[str, Any]
) -> None:
    engine = service.engine
    async with posted(service, path, body, X_Request_Id="me") as reply:
        await eventually(lambda: bool(engine.streams) and all(stream.sent for stream in engine.streams))
        [entry] = await listed(service)
        response = await delete(service, "me")
        assert (response.status, await response.json()) == (200, {"object": "list", "data": [entry]})
        aborted = await reply
        assert (aborted.status, await aborted.json()) == (410, error)
    assert service.is_idle()
    assert await service.sample('tgi_request_failure{err="aborted"}') == len(engine.streams)
    assert await service.sample('tgi_request_failure{err="dropped"}') == 0
    assert (await delete(service, "me")).status == 404


@pytest.mark.parametrize(("path", "body", "error"), STREAMED)
async def test_an_aborted_stream_ends_with_an_error_event(
    service: Service, path: str, body: dict[str, Any], error: dict[str, Any]
) -> None:
    reply = await service.post(path, body, X_Request_Id="me")
    await eventually(lambda: all(stream.sent for stream in service.engine.streams))
    assert (await delete(service, "me")).status == 200
    sent = [event for event in events(await reply.text()) if event != "[DONE]"]
    assert sent[-1] == error
    assert len(sent) == 1 + len(service.engine.streams)
    assert service.is_idle()
    assert await service.sample('tgi_request_failure{err="aborted"}') == len(service.engine.streams)


@pytest.mark.parametrize(("path", "body"), [("/api/generate", {"prompt": "a"}), ("/api/chat", {"messages": MESSAGES})])
async def test_an_aborted_stream_of_lines_ends_with_an_error_line(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    reply = await service.post(path, {"model": "m", **body}, X_Request_Id="me")
    await eventually(lambda: all(stream.sent for stream in service.engine.streams))
    assert (await delete(service, "me")).status == 200
    lines = [msgspec.json.decode(line) for line in (await reply.text()).splitlines()]
    assert lines[-1] == TGIS
    assert not lines[0]["done"]
    assert service.is_idle()


@pytest.mark.parametrize(("path", "body", "error"), WHOLE)
async def test_an_abort_interrupts_tokenization(
    service: Service, path: str, body: dict[str, Any], error: dict[str, Any]
) -> None:
    service.engine.tokenizing = asyncio.Event()
    async with posted(service, path, body, X_Request_Id="me") as reply:
        await eventually(lambda: service.free_permits < service.limits.max_concurrent_requests)
        assert (await delete(service, "me")).status == 200
        aborted = await reply
        assert (aborted.status, await aborted.json()) == (410, error)
    assert service.is_idle()
    assert not service.engine.streams


async def test_an_abort_releases_the_permit_of_a_client_that_does_not_read(service: Service) -> None:
    service.engine.script = lambda _: [word("x" * 100_000)] * 1000
    reply = await service.post("/generate_stream", {"inputs": "a"}, X_Request_Id="me")
    [stream] = service.engine.streams
    sent = -1
    while sent != stream.sent:
        sent = stream.sent
        await asyncio.sleep(0.05)
    assert 0 < sent < 1000
    assert (await delete(service, "me")).status == 200
    # The slow client is not disconnected yet, which would break its reply.
    await eventually(service.is_idle)
    assert await listed(service) == []
    assert events(await reply.text())[-1] == TGIS


async def test_requests_of_one_id_are_aborted_together(service: Service) -> None:
    async with (
        posted(service, "/generate", {"inputs": "a"}, X_Request_Id="me") as first,
        posted(service, "/v1/completions", {"prompt": "a"}, X_Request_Id="me") as second,
        posted(service, "/generate", {"inputs": "a"}, X_Request_Id="other"),
    ):
        await eventually(lambda: len(service.engine.streams) == 3)
        assert [entry["id"] for entry in await listed(service)].count("me") == 2
        response = await delete(service, "me")
        assert [entry["id"] for entry in (await response.json())["data"]] == ["me", "me"]
        assert {(await first).status, (await second).status} == {410}
        assert [entry["id"] for entry in await listed(service)] == ["other"]
    await eventually(service.is_idle)


async def test_aborting_an_unknown_request_is_404(service: Service) -> None:
    response = await delete(service, "nobody")
    assert (response.status, (await response.json())["error"]) == (
        404,
        {
            "message": "This API key has no request in progress with this id. Given: nobody",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found",
        },
    )


@pytest.mark.parametrize("body", [{"inputs": ""}, {"inputs": "a"}])
async def test_a_failed_request_is_no_longer_listed(service: Service, body: dict[str, Any]) -> None:
    service.engine.script = lambda _: [GenerationError("gone")]
    assert (await service.post("/generate", body)).status in {422, 424}
    assert await listed(service) == []


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_request_whose_client_disconnects_is_no_longer_listed(service: Service, path: str) -> None:
    async with posted(service, path, {"inputs": "a"}) as reply:
        await eventually(lambda: bool(service.engine.streams))
        assert len(await listed(service)) == 1
        if path == "/generate_stream":
            (await reply).close()
    await eventually(service.is_idle)
    assert await listed(service) == []


async def test_a_refused_request_is_not_listed() -> None:
    async with serving(ScriptedEngine(), Limits(max_concurrent_requests=1)) as service:
        assert (await service.post("/v1/completions", {"prompt": "a", "n": 2})).status == 429
        assert await listed(service) == []


KEYS = [ApiKey(digest=digest_of(f"{name}-key"), tenant=Tenant(name=name)) for name in ("alice", "bob")]
AS_ALICE, AS_BOB = "Bearer alice-key", "Bearer bob-key"


async def test_a_key_cannot_see_or_abort_requests_of_others(engine: ScriptedEngine) -> None:
    async with serving(engine, access=Access(keyring=Keyring(KEYS, time.monotonic()))) as service:
        body = {"inputs": "a"}
        async with posted(service, "/generate", body, X_Request_Id="me", Authorization=AS_ALICE) as hers:
            await eventually(lambda: bool(engine.streams))
            assert await listed(service, Authorization=AS_BOB) == []
            foreign, unknown = [await delete(service, name, Authorization=AS_BOB) for name in ("me", "us")]
            assert foreign.status == unknown.status == 404
            assert await foreign.text() == (await unknown.text()).replace("us", "me")
            async with posted(service, "/generate", body, X_Request_Id="me", Authorization=AS_BOB) as his:
                await eventually(lambda: len(engine.streams) == 2)
                assert (await delete(service, "me", Authorization=AS_BOB)).status == 200
                assert (await his).status == 410
            assert len(await listed(service, Authorization=AS_ALICE)) == 1
            assert not hers.done()
        await eventually(service.is_idle)


async def test_openais_client_does_not_retry_an_aborted_request(service: Service) -> None:
    connect = partial(openai.OpenAI, base_url=f"{service.url}/v1", api_key="-", default_headers={"X-Request-Id": "me"})
    # The constructor reads files, which would block the loop.
    with await asyncio.to_thread(connect) as client:
        call = asyncio.create_task(asyncio.to_thread(client.completions.create, model="any", prompt="a"))
        await eventually(lambda: bool(service.engine.streams))
        assert (await delete(service, "me")).status == 200
        with pytest.raises(openai.APIStatusError) as caught:
            await call
        assert (caught.value.status_code, caught.value.code) == (410, "aborted")
    assert len(service.engine.streams) == 1


def in_progress() -> RequestInProgress:
    return RequestInProgress(request_id="me", owner="", route="/generate", arrived=0.0)


async def test_an_abort_between_two_blocks_interrupts_the_second() -> None:
    request = in_progress()
    async with request.abortable():
        pass
    request.abort()
    request.abort()
    with pytest.raises(AbortedError):
        async with request.abortable():
            raise AssertionError("the block must not run")


async def test_a_timeout_within_the_block_is_not_an_abort() -> None:
    with pytest.raises(TimeoutError):
        async with in_progress().abortable(), asyncio.timeout(0):
            await asyncio.sleep(1)


async def test_cancellation_takes_precedence_over_an_abort() -> None:
    request = in_progress()

    async def handler() -> None:
        async with request.abortable():
            await asyncio.sleep(1)

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    request.abort()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

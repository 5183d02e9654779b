"""/v1/responses over WebSocket: events, lanes, what only the connection keeps, limits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, WSServerHandshakeError

from caravan_dialects.api.error_table import REASON_HEADER
from caravan_dialects.api.limits import Limits
from caravan_router.http.app import Access
from caravan_router.http.server.state import ENDING
from caravan_scheduler.core.errors import GenerationError
from caravan_testing.http_server import Service, keys, serving
from caravan_testing.scripted_engine import Pause, WordEngine, prompt_text, word
from caravan_testing.waiting import DEADLINE_S, eventually

PATH = "/v1/responses"


@asynccontextmanager
async def connected(service: Service, **options: Any) -> AsyncIterator[ClientWebSocketResponse]:
    async with service.client.ws_connect(PATH, **options) as socket:
        yield socket


async def create(socket: ClientWebSocketResponse, text: str | None = None, **fields: Any) -> None:
    given = {} if text is None else {"input": text}
    await socket.send_json({"type": "response.create", **given, **fields})


async def until(socket: ClientWebSocketResponse, *kinds: str) -> list[Any]:
    """Return the events up to the first of one of these types."""
    found: list[Any] = []
    while not found or found[-1]["type"] not in kinds:
        found.append(await socket.receive_json(timeout=DEADLINE_S))
        assert found[-1]["type"] != "error" or "error" in kinds, found
    return found


async def answered(socket: ClientWebSocketResponse, text: str | None = None, **fields: Any) -> Any:
    """Return the whole response."""
    await create(socket, text, **fields)
    return (await until(socket, "response.completed"))[-1]["response"]


async def refused(socket: ClientWebSocketResponse) -> Any:
    [event] = await until(socket, "error")
    return event


async def test_events_are_those_of_the_stream() -> None:
    async with serving(WordEngine()) as service, connected(service) as socket:
        await create(socket, "Hi", model="scripted")
        events = await until(socket, "response.completed")
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert not any("stream_id" in event for event in events)
        response = events[-1]["response"]
        async with service.client.get(f"{PATH}/{response['id']}") as stored:
            assert await stored.json() == response
        again = await answered(socket, "More", previous_response_id=response["id"])
        assert again["previous_response_id"] == response["id"]
        assert prompt_text(service.engine) == "[user]Hi</s>[assistant]<900><901></s>[user]More</s>[assistant]"
        await eventually(service.is_idle, "everything released")


async def test_a_connection_continues_what_is_not_stored() -> None:
    async with serving(WordEngine()) as service, connected(service) as socket:
        first = await answered(socket, "Hi", store=False)
        async with service.client.get(f"{PATH}/{first['id']}") as missing:
            assert missing.status == 404
        second = await answered(socket, "More", store=False, previous_response_id=first["id"])
        assert prompt_text(service.engine) == "[user]Hi</s>[assistant]<900><901></s>[user]More</s>[assistant]"
        stored = await answered(socket, "Now keep it", previous_response_id=second["id"])
        async with service.client.get(f"{PATH}/{stored['id']}/input_items") as items:
            found = (await items.json())["data"]
        assert [item["content"][0]["text"] for item in found] == ["Now keep it", "Hello you", "More", "Hello you", "Hi"]
        async with connected(service) as other:
            await create(other, "Hi", previous_response_id=second["id"])
            assert (await refused(other))["error"]["code"] == "previous_response_not_found"


async def test_generate_false_prepares_a_response_to_continue() -> None:
    async with serving(WordEngine()) as service, connected(service) as socket:
        prepared = await answered(socket, "Hi", store=False, generate=False)
        assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 0)
        await answered(socket, previous_response_id=prepared["id"], store=False)
        assert prompt_text(service.engine) == "[user]Hi</s>[assistant]"


def paused(*words: str, after: int = 1) -> WordEngine:
    """Return an engine that waits after some of its words."""
    made = WordEngine(words=words or ("Hello", " you"))
    steps = list(made.script(None))  # type: ignore[arg-type]  # it is not read
    made.script = lambda _: [*steps[:after], Pause(), *steps[after:]]
    return made


async def test_a_lane_is_in_order_and_lanes_run_at_the_same_time() -> None:
    engine = paused()
    async with serving(engine) as service, connected(service) as socket:
        for lane, text in (("a", "1"), ("a", "2"), ("b", "3")):
            await create(socket, text, stream_id=lane, store=False)
        await eventually(lambda: len(engine.streams), "both lanes run", lambda count: count == 2)
        engine.resume.set()
        ends: list[str] = []
        events: dict[str, list[str]] = {"a": [], "b": []}
        while len(ends) < 3:
            event = await socket.receive_json()
            events[event["stream_id"]].append(event["type"])
            if event["type"] == "response.completed":
                ends.append(event["response"]["id"])
        assert events["a"] == events["b"] * 2, "one after the other"
        parent = ends[0]
        forks = [await answered(socket, "x", previous_response_id=parent, stream_id=lane) for lane in ("c", "d")]
        assert [fork["previous_response_id"] for fork in forks] == [parent, parent]


async def test_a_failed_request_drops_what_it_continues() -> None:
    engine = WordEngine()
    async with serving(engine) as service, connected(service) as socket:
        first = await answered(socket, "Hi", store=False)
        await create(socket, "More", store=False, previous_response_id=first["id"], temperature=-1, stream_id="a")
        event = await refused(socket)
        assert (event["status"], event["error"]["param"], event["stream_id"]) == (400, "temperature", "a")
        await create(socket, "More", previous_response_id=first["id"])
        assert (await refused(socket))["error"]["code"] == "previous_response_not_found"
        engine.script = lambda _: [word("Hello"), GenerationError("broken")]
        await create(socket, "Hi")
        failed = (await until(socket, "response.failed"))[-1]
        assert failed["response"]["status"] == "failed"


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("no JSON", None),
        ("[]", None),
        (f'{{"type": "response.create", "stream_id": "{"x" * 257}"}}', None),
        ('{"type": "session.update"}', "type"),
        ('{"type": "response.create", "background": true, "input": "x"}', "background"),
        ('{"type": "response.create", "input": 7}', "input"),
        ('{"type": "response.steer", "input": "x"}', None),
    ],
)
async def test_messages_that_are_refused(text: str, param: str | None) -> None:
    async with serving(WordEngine()) as service, connected(service) as socket:
        await socket.send_str(text)
        event = await refused(socket)
        assert event["status"] == 400
        assert event["error"]["param"] == param or param is None
        assert (await answered(socket, "Hi"))["status"] == "completed"


async def test_a_client_that_leaves_ends_its_responses() -> None:
    engine = paused()
    async with serving(engine) as service:
        async with connected(service) as socket:
            await create(socket, "Hi", stream_id="a")
            await create(socket, "Hi", stream_id="b")
            await eventually(lambda: len(engine.streams), "both run", lambda count: count == 2)
        await eventually(service.is_idle, "both end")


async def test_too_many_waiting_requests_are_refused() -> None:
    async with serving(paused()) as service, connected(service) as socket:
        for _ in range(65):
            await create(socket, "Hi", store=False)
        event = (await until(socket, "error"))[-1]
        assert event["status"] == 429
        assert event["error"]["headers"] == {"Retry-After": "1", REASON_HEADER: "overloaded"}


async def test_a_message_that_is_too_large_ends_the_connection() -> None:
    async with serving(WordEngine(), Limits(payload_limit=1000)) as service, connected(service) as socket:
        await create(socket, "x" * 2000)
        closed = await socket.receive()
        assert (closed.type, closed.data) == (WSMsgType.CLOSE, 1009)


async def test_a_connection_for_whose_messages_there_is_no_room_ends() -> None:
    limits = Limits(payload_limit=1 << 20, max_bodies_bytes=10_000)
    async with serving(WordEngine(), limits) as service, connected(service) as socket:
        await create(socket, "x" * 20_000)
        assert (await socket.receive()).type in {WSMsgType.CLOSED, WSMsgType.ERROR, WSMsgType.CLOSE}


async def test_a_connection_ends_after_an_hour() -> None:
    engine = paused()
    async with serving(engine, Limits(socket_life_s=0.05)) as service, connected(service) as socket:
        await create(socket, "Hi")
        code = "invalid_request"
        while code != "websocket_connection_limit_reached":
            await create(socket, "More", background=True, stream_id="b")
            code = (await until(socket, "error"))[-1]["error"]["code"]
        engine.resume.set()
        assert (await until(socket, "response.completed"))[-1]["response"]["status"] == "completed", "it has begun"
        assert (await until(socket, "error"))[-1]["error"]["code"] == "websocket_connection_limit_reached"
        assert (await socket.receive()).data == 1001


async def test_a_server_that_ends_lets_turns_end_and_tells_clients_to_reconnect() -> None:
    engine = paused()
    async with serving(engine) as service, connected(service) as socket:
        await create(socket, "Hi")
        await until(socket, "response.output_text.delta")
        service.app[ENDING].set()
        engine.resume.set()
        assert (await until(socket, "response.completed"))[-1]["response"]["status"] == "completed"
        assert (await socket.receive()).data == 1012
        with pytest.raises(WSServerHandshakeError) as info:
            async with connected(service):
                raise AssertionError
        assert info.value.status == 503


async def test_426_without_an_upgrade_or_with_websockets_switched_off() -> None:
    async with serving(WordEngine()) as service, service.client.get(PATH) as response:
        assert (response.status, response.headers["Upgrade"]) == (426, "websocket")
        assert (await response.json())["error"]["code"] == "upgrade_required"
    async with serving(WordEngine(), Limits(websockets=False)) as service:
        with pytest.raises(WSServerHandshakeError) as info:
            async with connected(service):
                raise AssertionError
        assert info.value.status == 426


async def test_a_handshake_that_is_not_complete_is_refused() -> None:
    async with serving(WordEngine()) as service:
        headers = {"Upgrade": "websocket", "Connection": "upgrade"}
        async with service.client.get(PATH, headers=headers) as response:
            assert response.status == 400


async def test_keys_are_needed_and_may_be_taken_away() -> None:
    access = keys("a", "b")
    async with serving(WordEngine(), access=access) as service:
        with pytest.raises(WSServerHandshakeError) as info:
            async with connected(service):
                raise AssertionError
        assert info.value.status == 401
        async with connected(service, headers={"Authorization": "Bearer a"}) as socket:
            assert (await answered(socket, "Hi"))["status"] == "completed"
            assert access.keyring is not None
            access.keyring.replace([], 0.0)
            await create(socket, "Hi")
            assert (await refused(socket))["status"] == 401


async def test_pages_of_other_origins_may_not_connect() -> None:
    access = Access(cors_allow_origin=("https://a.example",))
    async with serving(WordEngine(), access=access) as service:
        with pytest.raises(WSServerHandshakeError) as info:
            async with connected(service, origin="https://b.example"):
                raise AssertionError
        assert info.value.status == 403
        async with connected(service, origin="https://a.example") as socket:
            assert (await answered(socket, "Hi"))["status"] == "completed"


async def test_messages_may_be_compressed() -> None:
    async with serving(WordEngine()) as service, connected(service, compress=15) as socket:
        assert socket.compress
        assert (await answered(socket, "Hi" * 50))["status"] == "completed"


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    engine = WordEngine(words=("x" * 4_000_000,) * 8)
    engine.model = replace(engine.model, max_sequence_tokens=512)
    async with serving(engine, Limits(slow_client_timeout_s=0.2)) as service, connected(service) as socket:
        await create(socket, "Hi", store=False)
        await eventually(lambda: bool(engine.streams) and service.is_idle(), "the response ends")


async def test_a_ping_goes_to_a_client_that_gets_nothing_else() -> None:
    engine = paused(after=0)
    async with serving(engine, Limits(keep_alive_s=0.02)) as service, connected(service, autoping=False) as socket:
        await create(socket, "Hi")
        while (await socket.receive()).type is not WSMsgType.PING:
            pass
        engine.resume.set()

"""Two servers that share a PostgreSQL database: each can read and cancel what the other one works on."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from caravan_dialects.api.limits import Limits
from caravan_dialects.bulk.store import BulkSettings, BulkStore
from caravan_dialects.conversations.database import Bounds, Database
from caravan_dialects.conversations.nodes import Job, JobEnd, Step, Transaction
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_testing.http_server import Service, named_events, serving
from caravan_testing.postgres import cluster
from caravan_testing.scripted_engine import Pause, WordEngine
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.slow
PATH = "/v1/responses"


@pytest.fixture
def url() -> str:
    return cluster().new_database()


def paused(*words: str, after: int) -> WordEngine:
    """Return an engine that generates so many of ``words``, and the others when it may go on."""
    made = WordEngine(words=words)
    steps = list(made.script(None))  # type: ignore[arg-type]  # it is not read
    made.script = lambda _: [*steps[:after], Pause(), *steps[after:]]
    return made


@asynccontextmanager
async def server(url: str, engine: WordEngine, limits: Limits | None = None) -> AsyncIterator[Service]:
    store, bulk = Store(StoreSettings(place=url)), BulkStore(BulkSettings(place=url))
    async with serving(engine, limits, store=store, bulk=bulk) as service:
        yield service


@asynccontextmanager
async def two_servers(url: str, first: WordEngine, second: WordEngine) -> AsyncIterator[tuple[Service, Service]]:
    async with server(url, first) as one, server(url, second) as other:
        yield one, other


async def found(service: Service, path: str, status: int = 200) -> Any:
    async with service.client.get(path) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def begun(service: Service, **fields: Any) -> str:
    response_id: str = (await service.reply(PATH, {"input": "Hi", "background": True, **fields}))["id"]
    return response_id


async def events_of(service: Service, response_id: str) -> list[Any]:
    """Return all events of a response, as they come until its end."""
    async with service.client.get(f"{PATH}/{response_id}", params={"stream": "true"}) as response:
        assert response.status == 200, await response.text()
        return named_events(await response.text())


async def until_running(service: Service, response_id: str) -> None:
    """Wait for the first word of a response."""
    async with service.client.get(f"{PATH}/{response_id}", params={"stream": "true"}) as response:
        async for line in response.content:
            if line.startswith(b"event: response.output_text.delta"):
                response.close()
                return


async def test_a_response_is_followed_read_and_continued_at_another_server(url: str) -> None:
    engine = paused("a", "b", after=1)
    async with two_servers(url, engine, WordEngine()) as (first, second):
        response_id = await begun(first)
        await until_running(second, response_id)
        following = asyncio.create_task(events_of(second, response_id))
        running = await found(second, f"{PATH}/{response_id}")
        assert (running["status"], running["output"]) == ("in_progress", [])
        engine.resume.set()
        events = await following
        assert events == await events_of(first, response_id)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert await found(second, f"{PATH}/{response_id}") == events[-1]["response"]
        more = await second.reply(PATH, {"input": "More", "previous_response_id": response_id})
        assert (await found(first, f"{PATH}/{more['id']}"))["status"] == "completed"
        assert second.engine.streams != []


async def test_a_response_that_waits_is_queued_at_another_server(url: str) -> None:
    async with two_servers(url, paused("a", after=0), WordEngine()) as (first, second):
        response_id = await begun(first)
        assert (await found(second, f"{PATH}/{response_id}"))["status"] == "queued"


async def test_each_key_may_have_so_many_at_a_time_at_all_servers_together(url: str) -> None:
    limits, engine = Limits(max_background=2), paused("a", after=0)
    async with server(url, engine, limits) as first, server(url, WordEngine(), limits) as second:
        for _ in range(2):
            await begun(first)
        refused = await second.post(PATH, {"input": "Hi", "background": True})
        assert refused.status == 429
        assert "2 responses in the background" in (await refused.json())["error"]["message"]
        assert second.is_idle()
        engine.resume.set()
        await eventually(first.is_idle, "both end")
        await begun(second)


async def test_a_response_is_cancelled_and_deleted_at_another_server(url: str) -> None:
    async with two_servers(url, paused("a", "b", after=1), WordEngine()) as (first, second):
        one, other = await begun(first), await begun(first)
        await until_running(first, one)
        cancelled = await second.reply(f"{PATH}/{one}/cancel", None)
        assert (cancelled["id"], cancelled["status"]) == (one, "cancelled")
        assert cancelled["output"][0]["content"][0]["text"] == "a"
        async with second.client.delete(f"{PATH}/{other}") as response:
            assert response.status == 200
        for service in (first, second):
            await found(service, f"{PATH}/{other}", 404)
        await eventually(first.is_idle)


async def test_a_conversation_that_was_extended_elsewhere_is_not_extended_twice(url: str) -> None:
    engine = paused("a", "b", after=1)
    async with two_servers(url, engine, WordEngine()) as (first, second):
        conversation = (await second.reply("/v1/conversations", {}))["id"]
        losing = asyncio.create_task(first.post(PATH, {"input": "Hi", "conversation": conversation}))
        await eventually(lambda: bool(engine.streams), "it runs")
        await second.reply(PATH, {"input": "Hi", "conversation": conversation})
        engine.resume.set()
        assert (await losing).status == 409
        assert len((await found(first, f"/v1/conversations/{conversation}/items"))["data"]) == 2


async def test_what_an_ending_server_leaves_goes_on_at_another_from_the_last_token(url: str) -> None:
    second = WordEngine(words=("a", "b"))
    async with AsyncExitStack() as ending, server(url, second) as other:
        one = await ending.enter_async_context(server(url, paused("a", "b", after=1)))
        response_id = await begun(one)
        await until_running(one, response_id)
        following = asyncio.create_task(events_of(other, response_id))
        await ending.aclose()
        events = await following
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
        [stream] = second.streams
        assert stream.sent == 2, "b and the end"


@pytest.mark.parametrize("expected", [(), ("another",)])
async def test_a_response_goes_on_at_a_server_that_has_its_adapter(
    url: str, expected: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first, second, third = paused("a", "b", after=1), WordEngine(words=("x", "y")), WordEngine(words=("a", "b"))
    first.model = third.model = replace(first.model, adapters=("poet",))
    second.model, second.expected = replace(second.model, adapters=()), expected
    async with AsyncExitStack() as ending, server(url, second) as other:
        one = await ending.enter_async_context(server(url, first))
        response_id = await begun(one, model="poet")
        await until_running(one, response_id)
        following = asyncio.create_task(events_of(other, response_id))
        await ending.aclose()
        await eventually(lambda: f"{response_id} in the background is left to a server that has poet" in caplog.text)
        async with server(url, third):
            events = await following
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
        assert events[-1]["response"]["model"] == "poet"
        assert (len(second.streams), len(third.streams)) == (0, 1)


def line(number: int) -> str:
    body = {"model": "m", "prompt": f"Say {number}", "max_tokens": 8}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body})


async def batch_of(service: Service, lines: int) -> str:
    """Begin a batch of so many lines."""
    data = {"purpose": "batch", "file": io.BytesIO("\n".join(map(line, range(lines))).encode())}
    async with service.client.post("/v1/files", data=data) as response:
        assert response.status == 200, await response.text()
        file = await response.json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id: str = (await service.reply("/v1/batches", body))["id"]
    return batch_id


async def reached(service: Service, batch_id: str, *statuses: str) -> Any:
    return await eventually(
        lambda: found(service, f"/v1/batches/{batch_id}"), f"{statuses}", lambda one: one["status"] in statuses
    )


async def test_a_batch_and_its_files_are_read_and_cancelled_at_another_server(url: str) -> None:
    first = WordEngine()
    async with two_servers(url, first, WordEngine()) as (one, other):
        done = await reached(other, await batch_of(one, 3), "completed")
        async with other.client.get(f"/v1/files/{done['output_file_id']}/content") as response:
            assert [json.loads(text)["custom_id"] for text in (await response.text()).splitlines()] == [
                "r0",
                "r1",
                "r2",
            ]
        async with one.client.delete(f"/v1/files/{done['output_file_id']}") as response:
            assert response.status == 200
        await found(other, f"/v1/files/{done['output_file_id']}/content", 404)
        first.script = lambda _: [Pause()]
        batch_id = await batch_of(one, 3)
        await reached(other, batch_id, "in_progress")
        assert (await other.reply(f"/v1/batches/{batch_id}/cancel", {}))["status"] in ("cancelling", "cancelled")
        ended = await reached(one, batch_id, "cancelled")
        assert ended["request_counts"] == {"total": 3, "completed": 0, "failed": 3}
        assert other.engine.streams == []
        async with one.client.get(f"/v1/files/{ended['error_file_id']}/content") as response:
            assert len((await response.text()).splitlines()) == 3


async def test_what_runs_waits_for_a_database_that_is_away_and_the_rest_gets_503(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = paused("a", "b", after=1)
    async with server(url, engine) as service:
        response_id = await begun(service)
        await until_running(service, response_id)
        await asyncio.to_thread(cluster().stop)
        try:
            engine.resume.set()
            for path in (f"{PATH}/{response_id}", "/v1/batches"):
                refused = await found(service, path, 503)
                assert refused["error"]["code"] == "store_unavailable"
            assert (await service.reply(PATH, {"input": "Hi", "store": False}))["status"] == "completed"
        finally:
            await asyncio.to_thread(cluster().start)
        events = await eventually(
            lambda: events_of(service, response_id), "the database is back", ignoring=(AssertionError,)
        )
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert len(engine.streams) == 2, "nothing is computed twice"
        # However often they are polled.
        await eventually(lambda: caplog.text.count("again, the database was away") == 2, "both stores are back")
        assert caplog.text.count("cannot be read") == 2, caplog.text


def test_a_server_that_was_taken_for_lost_adds_nothing_to_what_another_one_continues(url: str) -> None:
    bounds = Bounds(max_bytes=1 << 30, life_s=3600)
    first, second = Database(url, bounds), Database(url, bounds)
    first.jobs.add(Job(id="r", owner="k", request=b"{}", response=b"{}"), Step(first=0, events=(b"0",)), 1.0)
    assert second.jobs.under_way() == []
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_locks WHERE locktype = 'advisory' AND objid::bigint = %s",
            (first._connection.server,),
        )
    [taken] = second.jobs.under_way()
    assert taken.id == "r"
    with pytest.raises(Exception, match="terminating connection"):
        first.jobs.append("r", Step(first=1, events=(b"1",)))
    assert not first.jobs.append("r", Step(first=1, events=(b"1",)))
    assert not first.commit("k", Transaction(ended=JobEnd(id="r", step=Step(first=1, events=(b"1",)))), 1.0)
    assert second.jobs.append("r", Step(first=1, events=(b"2",)))
    assert first.jobs.events("r", 0) == [b"0", b"2"]
    assert first.jobs.under_way() == []
    first.close()
    second.close()

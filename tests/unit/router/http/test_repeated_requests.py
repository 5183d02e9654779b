"""`Idempotency-Key`: requests that are sent again because their reply was lost."""

import asyncio
from typing import Any

import pytest
from aiohttp import FormData

from caravan_dialects.bulk.store import BulkStore, Page
from caravan_dialects.conversations.nodes import Added
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_dialects.sql.connection import Place
from caravan_router.http.bulk.running import BULK
from caravan_router.http.server.state import STATE
from caravan_testing.http_server import Service, keys, named_events, serving
from caravan_testing.scripted_engine import Pause, WordEngine
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("either_store")

LINE = b'{"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}'


def engine() -> WordEngine:
    return WordEngine(words=("Hello", " you"))


async def uploaded(service: Service, key: str, content: bytes = LINE, bearer: str = "one") -> str:
    form = FormData({"purpose": "batch"})
    form.add_field("file", content, filename="requests.jsonl")
    headers = {"Idempotency-Key": key, "Authorization": f"Bearer {bearer}"}
    async with service.client.post("/v1/files", data=form, headers=headers) as response:
        assert response.status == 200, await response.text()
        file_id: str = (await response.json())["id"]
    return file_id


async def begun(service: Service, key: str, **fields: Any) -> Any:
    return await service.reply("/v1/responses", {"input": "Hi", "background": True, **fields}, Idempotency_Key=key)


async def test_a_file_is_kept_once_for_each_key_of_each_client() -> None:
    async with serving(engine(), access=keys("one", "other")) as service:
        first = await uploaded(service, "a", b"first")
        # It counts once also for the room.
        assert await uploaded(service, "a", b"second") == first
        ids = {first, await uploaded(service, "b"), await uploaded(service, "a", bearer="other")}
        assert len(ids) == 3
        async with service.client.get(
            f"/v1/files/{first}/content", headers={"Authorization": "Bearer one"}
        ) as response:
            assert await response.read() == b"first"


async def test_a_batch_is_begun_once_also_when_its_file_is_gone() -> None:
    async with serving(engine()) as service:
        file_id = await uploaded(service, "a")
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        twice = await asyncio.gather(*(service.reply("/v1/batches", body, Idempotency_Key="a") for _ in range(2)))
        batch_id = twice[0]["id"]
        assert twice[1]["id"] == batch_id

        async def status() -> str:
            async with service.client.get(f"/v1/batches/{batch_id}") as response:
                return str((await response.json())["status"])

        await eventually(status, "it ends", lambda one: one == "completed")
        async with service.client.delete(f"/v1/files/{file_id}") as response:
            assert response.status == 200
        again = await service.reply("/v1/batches", body, Idempotency_Key="a")
        assert (again["id"], again["status"]) == (batch_id, "completed")
        assert len(service.engine.streams) == 1
        other = body | {"input_file_id": await uploaded(service, "b")}
        assert (await service.reply("/v1/batches", other))["id"] != batch_id


async def test_a_response_in_the_background_is_generated_once() -> None:
    made = engine()
    steps = list(made.script(None))  # type: ignore[arg-type]  # it is not read
    made.script = lambda _: [steps[0], Pause(), *steps[1:]]
    async with serving(made) as service:
        first = await begun(service, "a")
        await eventually(lambda: made.streams, "it runs")
        assert (await begun(service, "a"))["id"] == first["id"]
        body = {"input": "Hi", "background": True, "stream": True}
        following = asyncio.create_task(service.post("/v1/responses", body, Idempotency_Key="a"))
        made.resume.set()
        events = named_events(await (await following).text())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello you"
        # Also after its end.
        assert await begun(service, "a") == events[-1]["response"]
        assert len(made.streams) == 1
        assert (await begun(service, "b"))["id"] != first["id"]
        await eventually(service.is_idle, "everything released")


async def test_a_response_that_is_being_begun_is_not_begun_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(engine()) as service:
        waiting, resume = asyncio.Event(), asyncio.Event()
        store = service.app[STATE].store
        add_job = store.add_job

        async def slow(*given: Any) -> Added:
            waiting.set()
            await resume.wait()
            return await add_job(*given)

        monkeypatch.setattr(store, "add_job", slow)
        first = asyncio.create_task(begun(service, "a"))
        await waiting.wait()
        refused = await service.post("/v1/responses", {"input": "Hi", "background": True}, Idempotency_Key="a")
        assert (refused.status, (await refused.json())["error"]["code"]) == (409, "request_repeated")
        resume.set()
        assert (await begun(service, "a"))["id"] == (await first)["id"]


MESSAGES = "/v1/messages/batches"
MESSAGE = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}


async def test_a_batch_of_messages_is_begun_once_and_keeps_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"requests": [{"custom_id": "one", "params": MESSAGE}]}
    async with serving(engine()) as service:
        store, keep, both = service.app[BULK], BulkStore.keep, asyncio.Barrier(2)

        async def together(store: BulkStore, *given: Any) -> Any:
            await both.wait()
            return await keep(store, *given)

        monkeypatch.setattr(BulkStore, "keep", together)
        first, second = await asyncio.gather(*(service.reply(MESSAGES, body, Idempotency_Key="a") for _ in range(2)))
        assert first["id"] == second["id"]
        assert len(await store.files("", Page(limit=9))) == 1
        again = await service.reply(MESSAGES, body, Idempotency_Key="a")
        assert again["id"] == first["id"]

        async def status() -> str:
            async with service.client.get(f"{MESSAGES}/{first['id']}") as response:
                return str((await response.json())["processing_status"])

        await eventually(status, "it ends", lambda one: one == "ended")
        assert len(service.engine.streams) == 1


async def test_a_response_that_another_server_begins_at_the_same_time_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, add_job = asyncio.Barrier(2), Store.add_job

    async def together(*given: Any) -> Added:
        await both.wait()
        return await add_job(*given)

    monkeypatch.setattr(Store, "add_job", together)
    one, other = Store(StoreSettings(place=place)), Store(StoreSettings(place=place))
    async with serving(engine(), store=one) as first, serving(engine(), store=other) as second:
        body = {"input": "Hi", "background": True}
        replies = await asyncio.gather(
            *(service.post("/v1/responses", body, Idempotency_Key="a") for service in (first, second))
        )
        assert sorted(reply.status for reply in replies) == [200, 409]
        begun, refused = sorted(replies, key=lambda reply: reply.status)
        assert (await refused.json())["error"]["code"] == "request_repeated"
        response_id = (await begun.json())["id"]
        for service in (first, second):
            assert (await service.reply("/v1/responses", body, Idempotency_Key="a"))["id"] == response_id
        await eventually(lambda: first.is_idle() and second.is_idle(), "everything released")
        assert len([*first.engine.streams, *second.engine.streams]) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_has_a_limited_length(key: str) -> None:
    async with serving(engine()) as service:
        refused = await service.post("/v1/responses", {"input": "Hi", "background": True}, Idempotency_Key=key)
        assert refused.status == 400
        assert "1 to 255 characters" in (await refused.json())["error"]["message"]

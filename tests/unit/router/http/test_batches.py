"""Files and batches, in the forms of OpenAI and Anthropic."""

import asyncio
import json
import os
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import FormData, web

from caravan_dialects.api.limits import Limits
from caravan_dialects.bulk.file_table import Upload
from caravan_dialects.bulk.store import BulkSettings, BulkStore
from caravan_dialects.sql.connection import Place
from caravan_router.http.bulk import batches, message_batches, running
from caravan_router.http.bulk import line as line_module
from caravan_router.http.bulk.line import LineRequest
from caravan_router.http.server.repeated import keyed_id
from caravan_scheduler.core.errors import GenerationError, NoShardError
from caravan_testing.http_server import Service, keys, serving
from caravan_testing.scripted_engine import Pause, WordEngine
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("either_store")

ENDPOINT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def engine(*words: str) -> WordEngine:
    return WordEngine(words=words or ("Hello", " you"))


def request_line(custom_id: str, body: Any, url: str = ENDPOINT) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def prompts(count: int) -> str:
    return "\n".join(request_line(f"r{number}", {"prompt": f"Number {number}"}) for number in range(count))


async def uploaded(service: Service, content: str | bytes, status: int = 200, **fields: Any) -> Any:
    form = FormData({"purpose": "batch"} | fields)
    form.add_field("file", content.encode() if isinstance(content, str) else content, filename="requests.jsonl")
    async with service.client.post("/v1/files", data=form) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def begun(service: Service, content: str, **fields: Any) -> Any:
    file = await uploaded(service, content)
    body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"} | fields
    return await service.reply("/v1/batches", body)


async def found(service: Service, path: str, status: int = 200) -> Any:
    async with service.client.get(path) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def ended(service: Service, batch_id: str) -> Any:
    return await eventually(
        lambda: found(service, f"/v1/batches/{batch_id}"), "the batch ends", lambda one: one["status"] in ENDED
    )


async def lines_of(service: Service, file_id: str) -> list[Any]:
    async with service.client.get(f"/v1/files/{file_id}/content") as response:
        assert response.status == 200
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def test_a_file_is_kept_listed_read_and_deleted() -> None:
    async with serving(engine()) as service:
        file = await uploaded(service, b"\x00\xffcontent")
        assert file | {"id": "", "created_at": 0, "expires_at": 0} == {
            "id": "",
            "object": "file",
            "bytes": 9,
            "created_at": 0,
            "expires_at": 0,
            "filename": "requests.jsonl",
            "purpose": "batch",
            "status": "processed",
        }
        other = await uploaded(service, b"x", purpose="user_data")
        listed = await found(service, "/v1/files?limit=1")
        assert ([one["id"] for one in listed["data"]], listed["has_more"]) == ([other["id"]], True)
        after = await found(service, f"/v1/files?after={other['id']}")
        assert [one["id"] for one in after["data"]] == [file["id"]]
        assert [one["id"] for one in (await found(service, "/v1/files?purpose=user_data"))["data"]] == [other["id"]]
        async with service.client.get(f"/v1/files/{file['id']}/content") as response:
            assert await response.read() == b"\x00\xffcontent"
        async with service.client.delete(f"/v1/files/{file['id']}") as response:
            assert (await response.json())["deleted"] is True
        await found(service, f"/v1/files/{file['id']}", 404)


async def test_files_have_an_end_and_a_purpose() -> None:
    async with serving(engine()) as service:
        expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = await uploaded(service, "x", 200, **expiry)
        assert file["expires_at"] - file["created_at"] == 3600
        refused = await uploaded(service, "x", 400, **{**expiry, "expires_after[seconds]": "5"})
        assert "Given: 5" in refused["error"]["message"]
        refused = await uploaded(service, "x", 400, purpose="fun")
        assert refused["error"]["param"] == "purpose"


async def test_a_key_sees_its_own_files_alone_and_leaves_room_to_others(tmp_path: Path) -> None:
    bulk = BulkStore(BulkSettings(place=tmp_path, max_bytes=1_000))
    async with serving(engine(), access=keys("one", "other"), bulk=bulk) as service:
        service.client.headers["Authorization"] = "Bearer one"
        file = await uploaded(service, "x" * 400)
        refused = await uploaded(service, "x" * 200, 413)
        assert "100 more bytes" in refused["error"]["message"]
        service.client.headers["Authorization"] = "Bearer other"
        await found(service, f"/v1/files/{file['id']}", 404)
        await uploaded(service, "x" * 300)
    assert not [name for name in await asyncio.to_thread(os.listdir, tmp_path) if name.startswith("incoming")]


async def test_a_batch_answers_each_line_as_its_route_does() -> None:
    async with serving(engine()) as service:
        wrong = request_line("wrong", {"prompt": "Hi", "temperature": "hot"})
        batch = await begun(service, f"{prompts(3)}\n{wrong}", metadata={"a": "b"})
        assert (batch["status"], batch["metadata"], batch["output_file_id"]) == ("validating", {"a": "b"}, None)
        batch = await ended(service, batch["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        lines = await lines_of(service, batch["output_file_id"])
        assert [one["custom_id"] for one in lines] == ["r0", "r1", "r2"]
        assert {one["response"]["status_code"] for one in lines} == {200}
        assert {one["response"]["body"]["choices"][0]["text"] for one in lines} == {"Hello you"}
        [failed] = await lines_of(service, batch["error_file_id"])
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("wrong", 400)
        assert "temperature" in failed["response"]["body"]["error"]["message"]
        await eventually(service.is_idle, "everything released")


@pytest.mark.parametrize(
    ("endpoint", "body", "text"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "Hello you"),
        ("/v1/responses", {"input": "Hi"}, "Hello you"),
    ],
)
async def test_chats_and_responses_are_answered_too(endpoint: str, body: Any, text: str) -> None:
    async with serving(engine()) as service:
        batch = await begun(service, request_line("one", body, endpoint), endpoint=endpoint)
        batch = await ended(service, batch["id"])
        [line] = await lines_of(service, batch["output_file_id"])
        assert text in json.dumps(line["response"]["body"])


@pytest.mark.parametrize(
    ("body", "word"), [({"stream": True}, "stream"), ({"priority": 50}, "priority"), ({"n": 99}, "n")]
)
async def test_a_line_has_no_stream_and_no_higher_priority(body: Any, word: str) -> None:
    async with serving(engine()) as service:
        batch = await ended(service, (await begun(service, request_line("one", {"prompt": "Hi"} | body)))["id"])
        [line] = await lines_of(service, batch["error_file_id"])
        assert word in line["response"]["body"]["error"]["message"]


async def test_lines_have_the_lowest_priority() -> None:
    words = engine()
    async with serving(words) as service:
        await ended(service, (await begun(service, prompts(1)))["id"])
        assert words.spec.priority == -100


async def test_a_file_with_a_wrong_line_fails_before_any_line_is_answered() -> None:
    async with serving(engine()) as service:
        batch = await ended(service, (await begun(service, f"{prompts(2)}\nnonsense"))["id"])
        assert batch["status"] == "failed"
        [error] = batch["errors"]["data"]
        assert (error["code"], error["line"]) == ("invalid_json_line", 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
async def test_a_wrong_batch_is_refused_by_its_field(fields: Any, param: str) -> None:
    async with serving(engine()) as service:
        file = await uploaded(service, prompts(1))
        body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"} | fields
        response = await service.post("/v1/batches", body)
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
        response = await service.post("/v1/batches", {**body, "input_file_id": "file_none"} | {"endpoint": ENDPOINT})
        assert response.status in (400, 404)


async def test_no_more_lines_run_at_a_time_than_the_limit() -> None:
    words = engine()
    words.script = lambda _: [Pause()]
    async with serving(words, Limits(batch_concurrency=2)) as service:
        batch = await begun(service, prompts(5))
        await eventually(lambda: len(words.streams) == 2, "two lines run")
        listed = await found(service, "/v1/requests")
        assert len(listed["data"]) == 2
        response = await service.post(f"/v1/batches/{batch['id']}/cancel", {})
        assert (await response.json())["status"] == "cancelling"
        await ended(service, batch["id"])
        batch = await found(service, f"/v1/batches/{batch['id']}")
        assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
        assert batch["request_counts"] == {"total": 5, "completed": 0, "failed": 5}
        dropped = await lines_of(service, batch["error_file_id"])
        assert {one["error"]["code"] for one in dropped} == {"batch_cancelled"}
        response = await service.post(f"/v1/batches/{batch['id']}/cancel", {})
        assert response.status == 200
        await eventually(service.is_idle, "everything released")
    assert len(words.streams) == 2


async def test_a_batch_that_has_ended_cannot_be_cancelled() -> None:
    async with serving(engine()) as service:
        batch = await ended(service, (await begun(service, prompts(1)))["id"])
        response = await service.post(f"/v1/batches/{batch['id']}/cancel", {})
        assert response.status == 400
        assert "completed" in (await response.json())["error"]["message"]
        assert [one["id"] for one in (await found(service, "/v1/batches"))["data"]] == [batch["id"]]


async def test_lines_that_are_not_answered_in_time_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    words = engine()
    words.script = lambda _: [Pause()]
    monkeypatch.setattr(batches, "_HOUR_S", 0.0)
    async with serving(words) as service:
        batch = await ended(service, (await begun(service, prompts(2)))["id"])
        assert (batch["status"], batch["request_counts"]["failed"]) == ("expired", 2)
        dropped = await lines_of(service, batch["error_file_id"])
        assert {one["error"]["code"] for one in dropped} == {"batch_expired"}


async def test_a_line_waits_while_no_shard_is_up_and_fails_alone_when_it_cannot_be_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "_RETRY_S", 0.0)
    words = engine()
    normal, errors = (
        words.script,
        [NoShardError("none", model="m"), GenerationError("broken"), NoShardError("none", model="m")],
    )
    words.script = lambda spec: [errors.pop()] if errors else normal(spec)
    async with serving(words, Limits(batch_concurrency=1)) as service:
        batch = await ended(service, (await begun(service, prompts(3)))["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert len(words.streams) == 5


async def test_a_batch_whose_shard_is_away_leaves_the_room_to_others() -> None:
    words = engine()
    normal = words.script
    words.script = lambda spec: [NoShardError("none", model="m")] if spec.session == "away" else normal(spec)
    async with serving(words, Limits(batch_concurrency=1)) as service:
        lines = (request_line(f"r{number}", {"prompt": "Hi", "session_id": "away"}) for number in range(3))
        waiting = await begun(service, "\n".join(lines))
        await eventually(lambda: len(words.streams) == 1, "a line is tried")
        batch = await ended(service, (await begun(service, prompts(2)))["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert (await found(service, f"/v1/batches/{waiting['id']}"))["status"] == "in_progress"


async def test_the_rest_of_a_batch_is_dropped_when_its_file_is_deleted() -> None:
    words = engine()
    normal = words.script
    words.script = lambda spec: [Pause(), *normal(spec)]
    async with serving(words, Limits(batch_concurrency=1)) as service:
        batch = await begun(service, prompts(3))
        await eventually(lambda: len(words.streams) == 1, "a line runs")
        async with service.client.delete(f"/v1/files/{batch['input_file_id']}") as response:
            assert response.status == 200
        words.resume.set()
        batch = await ended(service, batch["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


async def test_a_bug_ends_its_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ["once"]

    async def answer_line(line: LineRequest, body: msgspec.Raw) -> bytes:
        if broken.pop() if broken else None:
            raise LookupError("a bug")
        return await line_module.answer_line(line, body)

    monkeypatch.setattr(running, "answer_line", answer_line)
    async with serving(engine(), Limits(batch_concurrency=1)) as service:
        batch = await ended(service, (await begun(service, prompts(3)))["id"])
        [line] = await lines_of(service, batch["error_file_id"])
        assert line["response"]["status_code"] == 500
        assert "a bug" not in json.dumps(line)


@pytest.mark.parametrize("answered", [0, 1, 3])
async def test_another_server_goes_on_with_a_batch_and_answers_no_line_twice(place: Place, answered: int) -> None:
    words = engine()
    normal, released = words.script, [True] * answered
    words.script = lambda spec: normal(spec) if released and released.pop() else [Pause()]
    async with serving(words, Limits(batch_concurrency=2), bulk=store_in(place)) as service:
        batch = await begun(service, prompts(5))
        await eventually(
            lambda: found(service, f"/v1/batches/{batch['id']}"),
            "some lines are answered",
            lambda one: one["request_counts"]["completed"] == answered,
        )
    again = engine()
    async with serving(again, bulk=store_in(place)) as service:
        batch = await ended(service, batch["id"])
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert len(again.streams) == 5 - answered
        lines = await lines_of(service, batch["output_file_id"])
        assert [one["custom_id"] for one in lines] == [f"r{number}" for number in range(5)]


async def test_one_server_at_a_time_works_on_a_folder(tmp_path: Path) -> None:
    first, second = engine(), engine()
    async with serving(second, bulk=store_in(tmp_path)) as after:
        pass
    async with serving(first, bulk=store_in(tmp_path)), serving(second, bulk=store_in(tmp_path)) as after:
        batch = await begun(after, prompts(2))
        assert (await found(after, f"/v1/batches/{batch['id']}"))["status"] == "validating"
    assert (first.streams, second.streams) == ([], [])


def store_in(place: Place) -> BulkStore:
    return BulkStore(BulkSettings(place=place))


def messages(count: int) -> dict[str, Any]:
    params = {"max_tokens": 8, "model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    return {"requests": [{"custom_id": f"m{number}", "params": params} for number in range(count)]}


async def ended_messages(service: Service, batch_id: str) -> Any:
    return await eventually(
        lambda: found(service, f"/v1/messages/batches/{batch_id}"),
        "the batch ends",
        lambda one: one["processing_status"] == "ended",
    )


async def results_of(service: Service, batch: Any) -> list[Any]:
    async with service.client.get(batch["results_url"]) as response:
        assert response.status == 200, await response.text()
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def test_a_message_batch_answers_in_anthropics_form() -> None:
    async with serving(engine()) as service:
        body = messages(2)
        body["requests"][1]["params"] = {"messages": "none"}
        batch = await service.reply("/v1/messages/batches", body)
        assert (batch["type"], batch["processing_status"], batch["results_url"]) == (
            "message_batch",
            "in_progress",
            None,
        )
        batch = await ended_messages(service, batch["id"])
        counts = {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 0}
        assert batch["request_counts"] == counts
        good, bad = await results_of(service, batch)
        assert (good["custom_id"], good["result"]["type"]) == ("m0", "succeeded")
        assert good["result"]["message"]["content"][0]["text"] == "Hello you"
        assert (bad["custom_id"], bad["result"]["type"]) == ("m1", "errored")
        assert bad["result"]["error"]["error"]["type"] == "invalid_request_error"
        assert [one["id"] for one in (await found(service, "/v1/messages/batches"))["data"]] == [batch["id"]]
        assert (await found(service, "/v1/batches"))["data"] == []
        async with service.client.delete(f"/v1/messages/batches/{batch['id']}") as response:
            assert (await response.json())["type"] == "message_batch_deleted"
        await found(service, f"/v1/messages/batches/{batch['id']}", 404)
        assert (await found(service, "/v1/files"))["data"] == []


async def test_a_message_batch_can_be_cancelled() -> None:
    words = engine()
    words.script = lambda _: [Pause()]
    async with serving(words) as service:
        batch = await service.reply("/v1/messages/batches", messages(2))
        await eventually(lambda: len(words.streams) == 2, "both requests run")
        response = await service.client.delete(f"/v1/messages/batches/{batch['id']}")
        assert response.status == 400
        response = await service.client.get(f"/v1/messages/batches/{batch['id']}/results")
        assert response.status == 400
        cancelling = await service.reply(f"/v1/messages/batches/{batch['id']}/cancel", {})
        assert cancelling["processing_status"] == "canceling"
        batch = await ended_messages(service, batch["id"])
        assert batch["request_counts"]["canceled"] == 2
        assert {one["result"]["type"] for one in await results_of(service, batch)} == {"canceled"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"requests": []}, "requests"),
        ({"requests": messages(1)["requests"] * 2}, "unique"),
        ({"requests": [{"custom_id": "", "params": {}}]}, "custom_id"),
        ({"requests": [{"custom_id": "a", "params": [5]}]}, "`requests[0].params` must be an object"),
    ],
)
async def test_a_wrong_message_batch_is_refused(change: Any, word: str) -> None:
    async with serving(engine()) as service:
        response = await service.post("/v1/messages/batches", change)
        assert response.status == 400
        assert word in (await response.json())["error"]["message"]


async def test_a_message_batch_whose_client_leaves_while_it_is_stored_has_its_file_and_no_other_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers, storing, may_store = list[asyncio.Task[Any]](), threading.Event(), threading.Event()
    finish = Upload.finish

    def noted(request: web.Request, prefix: str) -> str | None:
        handler = asyncio.current_task()
        assert handler is not None
        handlers.append(handler)
        return keyed_id(request, prefix)

    def slow(upload: Upload) -> Path:
        storing.set()
        may_store.wait()
        return finish(upload)

    monkeypatch.setattr(message_batches, "keyed_id", noted)
    monkeypatch.setattr(Upload, "finish", slow)
    async with serving(engine()) as service, AsyncExitStack() as stack:
        stack.callback(may_store.set)
        client = asyncio.create_task(service.post("/v1/messages/batches", messages(1)))
        await eventually(storing.is_set, "the batch is being stored")
        client.cancel()
        await eventually(handlers[0].cancelling, "its client has left")
        may_store.set()
        await asyncio.wait(handlers)
        [batch] = (await found(service, "/v1/messages/batches"))["data"]
        await ended_messages(service, batch["id"])
        async with service.client.delete(f"/v1/messages/batches/{batch['id']}") as response:
            assert response.status == 200
        assert (await found(service, "/v1/files"))["data"] == []

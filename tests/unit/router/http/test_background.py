"""Responses with `background`: they go on without a client, and every event can be read again."""

import asyncio
import random
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.responses import background
from caravan_dialects.conversations.nodes import START, Added, Job, Node, Position, Step, Transaction
from caravan_dialects.conversations.store import Store, StoreError, StoreSettings
from caravan_dialects.sql.connection import Place
from caravan_router.http.openai import background as background_jobs
from caravan_router.http.server.state import RUNNING, STATE
from caravan_scheduler.core.errors import DeadlineError, GenerationError, NoShardError
from caravan_testing.http_server import Service, keys, named_events, serving
from caravan_testing.scripted_engine import Pause, WordEngine, word
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("either_store")

PATH = "/v1/responses"


def engine(*words: str) -> WordEngine:
    return WordEngine(words=words or ("Hello", " you"))


async def begun(service: Service, **fields: Any) -> Any:
    return await service.reply(PATH, {"input": "Hi", "background": True, **fields})


async def events_after(service: Service, response_id: str, number: int | None = None) -> list[Any]:
    """Return the events of a response after one, up to the end of the stream."""
    query = {"stream": "true"} | ({} if number is None else {"starting_after": str(number)})
    async with service.client.get(f"{PATH}/{response_id}", params=query) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    return named_events(text) if text else []


async def found(service: Service, response_id: str) -> Any:
    async with service.client.get(f"{PATH}/{response_id}") as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def ended(service: Service, response_id: str) -> Any:
    return await eventually(
        lambda: found(service, response_id),
        "the response ends",
        lambda one: one["status"] not in ("queued", "in_progress"),
    )


async def test_a_response_is_queued_and_ends_without_a_client() -> None:
    async with serving(engine()) as service:
        queued = await begun(service)
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        whole = await ended(service, queued["id"])
        assert whole["status"] == "completed"
        assert whole["output"][0]["content"][0]["text"] == "Hello you"
        await eventually(service.is_idle, "everything released")


async def test_a_stream_begins_with_queued_and_can_be_read_again_from_any_event() -> None:
    async with serving(engine()) as service:
        events = named_events(
            await (await service.post(PATH, {"input": "Hi", "background": True, "stream": True})).text()
        )
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created", "queued", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
        response_id = events[0]["response"]["id"]
        assert await events_after(service, response_id) == events
        for number in range(len(events)):
            assert await events_after(service, response_id, number) == events[number + 1 :]
        assert await events_after(service, response_id, 10**9) == []


async def read_with_cuts(service: Service, response_id: str, cuts: Sequence[int]) -> bytes:
    """Return the events of a response as a client gets them that loses its connection after each event of ``cuts``."""
    read, last = b"", -1
    for cut in [*cuts, None]:
        query = {"stream": "true", "starting_after": str(last)}
        async with service.client.get(f"{PATH}/{response_id}", params=query) as response:
            async for line in response.content:
                read += line
                if line == b"\n":
                    last += 1
                    if last == cut:
                        response.close()
                        break
    return read


@pytest.mark.parametrize("responses", [1, pytest.param(10, marks=pytest.mark.slow)])
async def test_clients_that_are_cut_off_anywhere_get_the_same_bytes_and_nothing_is_computed_twice(
    responses: int,
) -> None:
    """100 random events of each response."""
    words = [f" w{number}" for number in range(200)]
    draw = random.Random(45)
    slow = engine(*words)
    slow.step_s = 0.002
    async with serving(slow) as service:
        ids = [(await begun(service))["id"] for _ in range(responses)]
        cuts = [sorted(draw.sample(range(len(words)), 100)) for _ in ids]
        texts = await asyncio.gather(*(read_with_cuts(service, *each) for each in zip(ids, cuts, strict=True)))
        for response_id, text in zip(ids, texts, strict=True):
            async with service.client.get(f"{PATH}/{response_id}", params={"stream": "true"}) as response:
                assert await response.read() == text
            events = named_events(text.decode())
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            assert deltas == "".join(words) == events[-1]["response"]["output"][0]["content"][0]["text"]
        assert [stream.sent for stream in service.engine.streams] == [len(words) + 1] * len(ids)


async def until_shown(service: Service, response_id: str, number: int) -> list[Any]:
    """Return the events of a response up to this one, which may have to come yet."""
    text, last = "", -1
    async with service.client.get(f"{PATH}/{response_id}", params={"stream": "true"}) as response:
        async for line in response.content:
            text += line.decode()
            if line == b"\n":
                last += 1
                if last == number:
                    response.close()
                    break
    return named_events(text)


def paused(*words: str, after: int) -> WordEngine:
    """Return an engine that generates so many of ``words``, and the others when it may go on."""
    made = engine(*words)
    steps = list(made.script(None))  # type: ignore[arg-type]  # it is not read
    made.script = lambda _: [*steps[:after], Pause(), *steps[after:]]
    return made


async def test_a_response_goes_on_in_the_next_router_from_the_last_token(place: Place) -> None:
    words = [f" w{number}" for number in range(20)]
    first = paused(*words, after=8)
    async with serving(first, store=Store(StoreSettings(place=place))) as service:
        body = {"temperature": 1.0, "max_output_tokens": 50, "stream": False, "metadata": {"a": "b"}}
        queued = await begun(service, **body)
        # created, queued, in_progress, item, part, and eight words.
        before = await until_shown(service, queued["id"], 12)
    second = engine(*words)
    async with serving(second, store=Store(StoreSettings(place=place))) as service:
        whole = await ended(service, queued["id"])
        events = await events_after(service, queued["id"])
        assert events[: len(before)] == before
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert deltas == "".join(words) == whole["output"][0]["content"][0]["text"]
        assert events[-1]["response"] == whole
        assert {event["item_id"] for event in events if "item_id" in event} == {whole["output"][0]["id"]}
        assert whole["usage"]["output_tokens"] == len(words) + 1
        assert (whole["metadata"], whole["created_at"]) == ({"a": "b"}, queued["created_at"])
        [one], [other] = first.streams, second.streams
        assert (one.sent, other.sent) == (8, len(words) + 1 - 8)
        assert other.spec.continued is not None
        assert other.spec.sampling == one.spec.sampling
        assert other.spec.prompt == one.spec.prompt
        # It is a turn as any other.
        more = await service.reply(PATH, {"input": "More", "previous_response_id": queued["id"]})
        assert more["status"] == "completed"


async def test_a_response_that_waits_for_its_model_can_be_read_and_cancelled(place: Place) -> None:
    async with serving(paused("a", "b", after=1), store=Store(StoreSettings(place=place))) as service:
        response_id = (await begun(service))["id"]
        await until_shown(service, response_id, 5)
    lost = engine("a", "b")
    lost.joined = False
    async with serving(lost, store=Store(StoreSettings(place=place))) as service:
        assert (await found(service, response_id))["status"] == "queued"
        assert len(await until_shown(service, response_id, 5)) == 6
        cancelled = await service.reply(f"{PATH}/{response_id}/cancel", None)
        assert cancelled["status"] == "cancelled"
        assert (await events_after(service, response_id, 5))[0]["type"] == "response.incomplete"
        assert (await found(service, response_id))["status"] == "cancelled"


async def test_a_response_waits_while_no_shard_is_up_and_keeps_its_tokens() -> None:
    made = engine("a", "b", "c")
    steps = list(made.script(None))  # type: ignore[arg-type]  # it is not read
    made.script = lambda _: steps if made.streams else [*steps[:1], NoShardError("all are lost")]
    async with serving(made) as service:
        response_id = (await begun(service))["id"]
        whole = await ended(service, response_id)
        assert whole["output"][0]["content"][0]["text"] == "abc"
        assert [stream.sent for stream in made.streams] == [1, 3]
        events = await events_after(service, response_id)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_what_a_lost_shard_has_generated_is_seen_and_kept_until_another_is_up() -> None:
    made = engine("a", "b")
    made.script = lambda _: [NoShardError("all are lost")] if made.streams else [word("a"), NoShardError("lost")]
    async with serving(made) as service:
        response_id = (await begun(service))["id"]
        await until_shown(service, response_id, 5)
        await eventually(lambda: made.streams[0].closed, "the shard is lost")
        assert (await found(service, response_id))["output"][0]["content"][0]["text"] == "a"
        cancelled = await service.reply(f"{PATH}/{response_id}/cancel", None)
        assert (cancelled["status"], cancelled["output"][0]["content"][0]["text"]) == ("cancelled", "a")
        assert await found(service, response_id) == cancelled
        assert (await events_after(service, response_id))[-1]["response"] == cancelled


async def test_a_response_that_is_stored_goes_on_though_its_client_leaves_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers, names, written, add_job = list[asyncio.Task[Any]](), list[str](), asyncio.Event(), Store.add_job

    async def slow(store: Store, job: Job, step: Step, most: int) -> Added:
        await written.wait()
        return await add_job(store, job, step, most)

    def noted(store: Store, job: Job, step: Step, most: int) -> Coroutine[Any, Any, Added]:
        handler = asyncio.current_task()
        assert handler is not None
        handlers.append(handler)
        names.append(job.id)
        return slow(store, job, step, most)

    monkeypatch.setattr(Store, "add_job", noted)
    async with serving(engine()) as service:
        client = asyncio.create_task(begun(service))
        await eventually(lambda: handlers, "the response is being stored")
        client.cancel()
        await eventually(handlers[0].cancelling, "its client has left")
        written.set()
        await asyncio.wait(handlers)
        assert (await ended(service, names[0]))["status"] == "completed"


async def test_what_fails_is_kept_as_failed() -> None:
    made = engine()
    made.script = lambda _: [word("a"), GenerationError("broken")]
    async with serving(made) as service:
        response_id = (await begun(service))["id"]
        failed = await ended(service, response_id)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "generation")
        events = await events_after(service, response_id)
        assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", failed)
        async with service.client.post(f"{PATH}/{response_id}/cancel") as response:
            assert (await response.json())["error"]["code"] == "response_ended"


async def test_a_response_is_cancelled_with_what_it_has() -> None:
    async with serving(paused("a", "b", after=1)) as service:
        response_id = (await begun(service))["id"]
        await until_shown(service, response_id, 5)
        cancelled = await service.reply(f"{PATH}/{response_id}/cancel", None)
        assert (cancelled["status"], cancelled["output"][0]["content"][0]["text"]) == ("cancelled", "a")
        assert await found(service, response_id) == cancelled
        assert (await events_after(service, response_id))[-1]["response"] == cancelled
        await eventually(service.is_idle, "everything released")


async def test_deleting_a_response_ends_it() -> None:
    async with serving(paused("a", "b", after=1)) as service:
        response_id = (await begun(service))["id"]
        async with service.client.delete(f"{PATH}/{response_id}") as response:
            assert (await response.json())["deleted"] is True
        for query in ({}, {"stream": "true"}):
            async with service.client.get(f"{PATH}/{response_id}", params=query) as response:
                assert response.status == 404
        await eventually(service.is_idle, "everything released")


async def test_a_response_ends_with_what_it_has_when_its_time_is_over() -> None:
    made = engine()
    made.script = lambda _: [word("a"), DeadlineError("late")]
    async with serving(made, Limits(background_life_s=60.0)) as service:
        for body, most in (
            ({}, 60.0),
            ({"timeout": 5}, 5.0),
            ({"background_options": {"completion_window": "8h"}}, 60.0),
        ):
            whole = await ended(service, (await begun(service, **body))["id"])
            assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "deadline_exceeded"})
            assert whole["output"][0]["content"][0]["text"] == "a"
            assert most - 5 < made.spec.timeout_s <= most


async def test_windows_go_after_all_others_and_jobs_are_sessions() -> None:
    async with serving(engine()) as service:
        options = {"completion_window": "2h", "continuation_id": "nightly"}
        await begun(service, background_options=options)
        assert (service.engine.spec.priority, service.engine.spec.session) == (-100, "nightly")
        await begun(service, background_options=options, priority=-3, session_id="other")
        assert (service.engine.spec.priority, service.engine.spec.session) == (-3, "other")


async def test_each_key_may_have_so_many_at_a_time() -> None:
    made = paused("a", after=0)
    async with serving(made, Limits(max_background=2), keys("one", "two")) as service:
        body = {"input": "Hi", "background": True}
        for _ in range(2):
            response = await service.post(PATH, body, Authorization="Bearer one")
            assert response.status == 200
        response = await service.post(PATH, body, Authorization="Bearer one")
        assert response.status == 429
        assert "2 responses in the background" in (await response.json())["error"]["message"]
        other = await service.post(PATH, body, Authorization="Bearer two")
        assert other.status == 200
        # It is not there for others.
        async with service.client.get(
            f"{PATH}/{(await other.json())['id']}?stream=true", headers={"Authorization": "Bearer one"}
        ) as response:
            assert response.status == 404
        made.resume.set()
        await eventually(service.is_idle, "all end")
        response = await service.post(PATH, body, Authorization="Bearer one")
        assert response.status == 200


async def test_streams_that_cannot_be_read_again_are_refused_by_name() -> None:
    async with serving(engine()) as service:
        plain = (await service.reply(PATH, {"input": "Hi"}))["id"]
        background = (await begun(service))["id"]
        for path, field in (
            (f"{plain}?stream=true", None),
            (f"{background}?stream=true&starting_after=x", "starting_after"),
            (f"{background}?stream=true&starting_after=-2", "starting_after"),
        ):
            async with service.client.get(f"{PATH}/{path}") as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == field


async def test_a_full_store_ends_a_response_and_nothing_unsaved_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise StoreError

    async with serving(engine()) as service:
        monkeypatch.setattr(service.app[STATE].store, "append", refuse)
        events = named_events(
            await (await service.post(PATH, {"input": "Hi", "background": True, "stream": True})).text()
        )
        assert [event["type"] for event in events] == ["response.created", "response.queued", "response.failed"]
        assert events[-1]["response"]["error"]["code"] == "store_unavailable"


async def test_an_end_that_a_file_refuses_is_stored_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise StoreError

    store = Store(StoreSettings(place=tmp_path / "state"))
    async with serving(engine(), store=store) as service:
        commit, tried, may_store = store.commit, asyncio.Semaphore(0), asyncio.Event()

        async def commit_if_possible(owner: str, transaction: Transaction) -> bool:
            tried.release()
            if not may_store.is_set():
                raise StoreError
            return await commit(owner, transaction)

        monkeypatch.setattr(background_jobs, "_RETRY_S", 0.001)
        monkeypatch.setattr(store, "append", refuse)
        monkeypatch.setattr(store, "commit", commit_if_possible)
        events = named_events(
            await (await service.post(PATH, {"input": "Hi", "background": True, "stream": True})).text()
        )
        response_id = events[0]["response"]["id"]
        assert events[-1]["type"] == "response.failed"
        for _ in range(3):
            await tried.acquire()
        assert (await found(service, response_id))["status"] == "in_progress"
        may_store.set()
        assert (await ended(service, response_id))["error"]["code"] == "store_unavailable"
        await eventually(lambda: service.app[RUNNING].is_busy, "nothing is under way", lambda busy: not busy)
        assert await events_after(service, response_id) == events


async def test_one_server_at_a_time_continues_what_is_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "state"
    after = engine("a", "b")
    async with AsyncExitStack() as stack:
        before = AsyncExitStack()
        first = await before.enter_async_context(
            serving(paused("a", "b", after=1), store=Store(StoreSettings(place=file)))
        )
        response_id = (await begun(first))["id"]
        shown = await until_shown(first, response_id, 5)
        second = await stack.enter_async_context(serving(after, store=Store(StoreSettings(place=file))))
        # The first one still has it, and what is stored can be read.
        assert await events_after(second, response_id) == shown
        assert (await found(second, response_id))["status"] == "in_progress"
        assert after.streams == []
        await before.aclose()
        assert (await ended(second, response_id))["output"][0]["content"][0]["text"] == "ab"


async def test_what_cannot_go_on_ends_as_failed(place: Place) -> None:
    one = {"Authorization": "Bearer one"}
    async with serving(paused("a", after=0), access=keys("one"), store=Store(StoreSettings(place=place))) as service:
        response = await service.post(PATH, {"input": "Hi", "background": True}, **one)
        response_id = (await response.json())["id"]
    # Its key was removed, and is there again.
    async with serving(engine("a"), access=keys("two"), store=Store(StoreSettings(place=place))) as service:
        assert service.engine.streams == []
    async with (
        serving(engine("a"), access=keys("one"), store=Store(StoreSettings(place=place))) as service,
        service.client.get(f"{PATH}/{response_id}", headers=one) as response,
    ):
        failed = await response.json()
        assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_api_key")


async def test_tokens_of_another_vocabulary_do_not_go_on(place: Place) -> None:
    async with serving(paused("a", "b", after=1), store=Store(StoreSettings(place=place))) as service:
        response_id = (await begun(service))["id"]
        await until_shown(service, response_id, 5)
    other = engine("a", "b")
    other.model = replace(other.model, fingerprint="0" * 16)
    async with serving(other, store=Store(StoreSettings(place=place))) as service:
        failed = await ended(service, response_id)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "model_replaced")
        assert (await events_after(service, response_id, 5))[0]["response"] == failed


async def test_a_conversation_is_extended_by_the_next_router(place: Place) -> None:
    async with serving(paused("a", "b", after=1), store=Store(StoreSettings(place=place))) as service:
        conversation = (await service.reply("/v1/conversations", {}))["id"]
        response_id = (await begun(service, conversation=conversation))["id"]
        await until_shown(service, response_id, 5)
    slow = paused("a", "b", after=1)
    async with serving(slow, store=Store(StoreSettings(place=place))) as service:
        busy = await service.post(PATH, {"input": "Hi", "conversation": conversation})
        assert (await busy.json())["error"]["code"] == "conversation_busy"
        slow.resume.set()
        await ended(service, response_id)
        async with service.client.get(f"/v1/conversations/{conversation}/items") as response:
            items = (await response.json())["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]
        assert items[0]["content"][0]["text"] == "ab"


async def test_calls_keep_their_ids(place: Place) -> None:
    pieces = ("<tool_call>\n", '{"name": "add", ', '"arguments": ', '{"a": 1', ', "b": 2}', "}\n</tool_call>")
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    async with serving(paused(*pieces, after=5), store=Store(StoreSettings(place=place))) as service:
        response_id = (await begun(service, tools=[tool]))["id"]
        before = await until_shown(service, response_id, 4)
    async with serving(engine(*pieces), store=Store(StoreSettings(place=place))) as service:
        [call] = (await ended(service, response_id))["output"]
        assert (call["type"], call["arguments"]) == ("function_call", '{"a": 1, "b": 2}')
        added = before[3]["item"]
        assert (added["id"], added["call_id"]) == (call["id"], call["call_id"])
        events = await events_after(service, response_id)
        assert events[:5] == before
        deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call["arguments"]


OTHERS_TURN = {
    "id": "i",
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "Meanwhile"}],
}


@pytest.mark.parametrize("forgets", [False, True], ids=["moved", "rewound"])
async def test_a_response_goes_on_from_where_it_began_though_its_conversation_has_moved(
    place: Place, forgets: bool
) -> None:
    first = paused("a", "b", after=1)
    async with serving(first, store=Store(StoreSettings(place=place))) as service:
        conversation = (await service.reply("/v1/conversations", {"items": [{"role": "user", "content": "One"}]}))["id"]
        response_id = (await begun(service, conversation=conversation))["id"]
        await until_shown(service, response_id, 5)
    other = Store(StoreSettings(place=place))
    named = await other.conversation("", conversation)
    assert named is not None
    head = named[0]
    node = Node(id="n", parent=START if forgets else head.position, items=(OTHERS_TURN,))
    moved = Transaction(node=node, head=replace(head, position=Position(node="n", items=1)), expected=head.position)
    assert await other.commit("", moved)
    await other.close()
    second = engine("a", "b")
    async with serving(second, store=Store(StoreSettings(place=place))) as service:
        failed = (await events_after(service, response_id))[-1]["response"]
        assert second.spec.prompt == first.spec.prompt
        # As if nothing had interrupted it.
        assert (failed["status"], failed["error"]["code"]) == ("failed", "head_moved")
        assert failed["output"][0]["content"][0]["text"] == "ab"
        await eventually(service.is_idle, "everything released")
    store = Store(StoreSettings(place=place))
    now = await store.conversation("", conversation)
    assert now is not None
    assert now[0].position == Position(node="n", items=1)
    await store.close()


@pytest.mark.parametrize("end", ["completed", "cancelled", "failed"])
async def test_a_response_that_goes_on_waits_for_its_conversation(
    place: Place, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "failed":
        monkeypatch.setattr(background, "deadline_of", lambda *_: time.time())
    other = engine("a", "b")
    steps = list(other.script(None))  # type: ignore[arg-type]  # it is not read
    other.script = lambda spec: steps if spec.continued else [Pause(), GenerationError("broken")]
    async with AsyncExitStack() as first_runs, AsyncExitStack() as stack:
        first = await first_runs.enter_async_context(
            serving(paused("a", "b", after=1), store=Store(StoreSettings(place=place)))
        )
        conversation = (await first.reply("/v1/conversations", {}))["id"]
        response_id = (await begun(first, conversation=conversation))["id"]
        await until_shown(first, response_id, 5)
        second = await stack.enter_async_context(serving(other, store=Store(StoreSettings(place=place))))
        stack.callback(other.resume.set)
        turn = asyncio.create_task(second.post(PATH, {"input": "Hi", "conversation": conversation}))
        await eventually(lambda: other.streams, "a turn extends it at the second server")
        await first_runs.aclose()
        await eventually(
            lambda: found(second, response_id),
            "the second server has the response",
            lambda one: one["status"] != "in_progress",
        )
        if end == "cancelled":
            cancelled = await second.reply(f"{PATH}/{response_id}/cancel", None)
            assert cancelled["status"] == "cancelled"
        elif end == "failed":
            failed = await ended(second, response_id)
            assert (failed["status"], failed["error"]["code"]) == ("failed", "conversation_busy")
        else:
            assert (await found(second, response_id))["status"] == "queued"
        assert len(other.streams) == 1
        other.resume.set()
        assert (await turn).status == 424
        whole = await ended(second, response_id)
        assert whole["status"] == end
        if end == "completed":
            assert whole["output"][0]["content"][0]["text"] == "ab"
        async with second.client.get(f"/v1/conversations/{conversation}/items") as response:
            items = (await response.json())["data"]
        assert [item["role"] for item in items] == (["assistant", "user"] if end == "completed" else [])
        await eventually(second.is_idle, "everything released")
        assert not second.app[RUNNING].is_busy

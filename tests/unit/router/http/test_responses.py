"""/v1/responses: bodies, events, stored turns, refusals."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from caravan_dialects.conversations.nodes import Node, Transaction
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_dialects.sql.connection import Place
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, keys, named_events, serving
from caravan_testing.scripted_engine import (
    EOS_TOKEN,
    TEMPLATE,
    WORD_MODEL,
    Pause,
    ScriptedEngine,
    Step,
    WordEngine,
    prompt_text,
    word,
)
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("either_store")

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
NAMESPACES = [{"type": "namespace", "name": name, "description": "Sums", "tools": [TOOL]} for name in ("a", "b")]


def engine(*words: str) -> WordEngine:
    return WordEngine(words=words or ("Hello", " you"))


async def stream(service: Service, body: Any) -> list[Any]:
    response = await service.post("/v1/responses", body | {"stream": True})
    assert response.status == 200, await response.text()
    return named_events(await response.text())


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


async def error(service: Service, body: Any, status: int = 400) -> Any:
    response = await service.post("/v1/responses", body)
    assert response.status == status, await response.text()
    return (await response.json())["error"]


async def test_a_whole_response_has_what_clients_read() -> None:
    async with serving(engine()) as service:
        reply = await service.reply("/v1/responses", {"input": "Hi", "instructions": "Be kind.", "metadata": {}})
        assert prompt_text(service.engine) == "[system]Be kind.</s>[user]Hi</s>[assistant]"
        assert reply["id"].startswith("resp_")
        assert len(reply["id"]) == 37
        [message] = reply["output"]
        assert message["content"] == [{"type": "output_text", "text": "Hello you", "annotations": [], "logprobs": []}]
        assert (message["role"], message["status"], message["type"]) == ("assistant", "completed", "message")
        prompt = len(service.engine.spec.prompt)
        assert reply["usage"] == {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + 3,
        }
        shown = {name: reply[name] for name in ("object", "status", "error", "incomplete_details", "metadata", "store")}
        assert shown == {
            "object": "response", "status": "completed", "error": None, "incomplete_details": None,
            "metadata": {}, "store": True,
        }  # fmt: skip
        async with service.client.get(f"/v1/responses/{reply['id']}") as stored:
            assert await stored.json() == reply
        await eventually(service.is_idle, "everything released")


async def test_a_stream_has_the_events_in_order_with_the_same_ids() -> None:
    async with serving(engine()) as service:
        events = await stream(service, {"input": "Hi"})
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}
        assert {event["item_id"] for event in events if "item_id" in event} == {events[2]["item"]["id"]}
        assert {event["output_index"] for event in events if "output_index" in event} == {0}
        assert {event["content_index"] for event in events if "content_index" in event} == {0}
        assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
        assert events[2]["item"]["content"] == []
        assert events[-2]["item"] == events[-1]["response"]["output"][0]
        assert events[-1]["response"]["usage"]["output_tokens"] == 3


async def test_an_output_that_is_cut_off_is_incomplete() -> None:
    async with serving(ScriptedEngine(model=WORD_MODEL)) as service:
        events = await stream(service, {"input": "Hi", "max_output_tokens": 2})
        last = events[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["response"]["output"][0]["status"] == "incomplete"
        # More than is left of the context counts as all that is left.
        reply = await service.reply("/v1/responses", {"input": "Hi", "max_output_tokens": 100_000})
        assert reply["usage"]["total_tokens"] == 512


async def test_the_next_turn_has_the_tokens_that_were_generated() -> None:
    async with serving(engine()) as service:
        first = await service.reply("/v1/responses", {"input": "Hi", "instructions": "A"})
        body = {"input": "More", "previous_response_id": first["id"], "instructions": "A"}
        second = await service.reply("/v1/responses", body)
        # "Hello" and " you" were one token each: the tokenizer would make one of each character.
        text = "[system]A</s>[user]Hi</s>[assistant]<900><901></s>[user]More</s>[assistant]"
        assert prompt_text(service.engine) == text
        third = await stream(service, {"input": "On", "previous_response_id": second["id"], "instructions": "A"})
        assert prompt_text(service.engine) == f"{text}<900><901></s>[user]On</s>[assistant]"
        # Instructions are those of one turn only.
        await service.reply("/v1/responses", {"input": "On", "previous_response_id": third[-1]["response"]["id"]})
        assert prompt_text(service.engine).startswith("[user]Hi</s>[assistant]Hello you</s>")


async def test_calls_become_items_and_their_outputs_messages() -> None:
    called = engine('<tool_call>{"name": "add", "arguments": {"a', '": 1}}</tool_call>')
    called.model = replace(WORD_MODEL, chat_template=TEMPLATE + "{# <tool_call> #}")
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": "add", "parameters": {"type": "object"}},
        {"type": "web_search"},
    ]
    async with serving(called) as service:
        events = await stream(service, {"input": "Hi", "tools": tools})
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "in_progress", "output_item.added"]
        assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
        assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
        deltas = "".join(event["delta"] for event in events if event["type"].endswith("delta"))
        [call] = events[-1]["response"]["output"]
        assert deltas == call["arguments"] == '{"a": 1}'
        assert events[2]["item"] | {"status": "completed", "arguments": deltas} == call
        fields = {"description": None, "parameters": None, "strict": False}
        assert events[-1]["response"]["tools"] == [fields | tools[0], tools[1]]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        previous = {"previous_response_id": events[-1]["response"]["id"], "tools": tools}
        await service.reply("/v1/responses", {"input": [output], **previous})
        assert prompt_text(service.engine).startswith("[user]Hi</s>[assistant]<tool_call>")
        assert "[tool]2</s>" in prompt_text(service.engine)
        for strict in (True, False):
            await service.reply("/v1/responses", {"input": "Hi", "tools": [{**tools[0], "strict": strict}]})
            assert (service.engine.spec.constraint is not None) == strict


async def test_custom_tools_are_functions_of_one_text() -> None:
    called = engine('<tool_call>{"name": "patch", "arguments": {"input": "a\\n', 'b"}}</tool_call>')
    called.model = replace(WORD_MODEL, chat_template=TEMPLATE + "{# <tool_call> #}")
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tools = [{"type": "custom", "name": "patch", "description": "Patches", "format": grammar}]
    async with serving(called) as service:
        events = await stream(service, {"input": "Hi", "tools": tools})
        assert [event["type"].removeprefix("response.") for event in events[2:]] == [
            "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        [call] = events[-1]["response"]["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "a\nb")
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        await service.reply("/v1/responses", {"input": [{"role": "user", "content": "Hi"}, call, output]})
        assert "[tool]done</s>" in prompt_text(service.engine)


async def test_the_input_of_a_custom_tool_is_text_whatever_the_model_writes() -> None:
    deep = '{"a": ' + "[" * 2000 + "]" * 2000 + "}"
    called = engine(f'<tool_call>{{"name": "patch", "arguments": {deep}}}</tool_call>')
    called.model = replace(WORD_MODEL, chat_template=TEMPLATE + "{# <tool_call> #}")
    async with serving(called) as service:
        body = {"input": "Hi", "tools": [{"type": "custom", "name": "patch"}]}
        [call] = (await service.reply("/v1/responses", body))["output"]
        assert call["input"] == deep
        assert (await stream(service, body))[-1]["response"]["output"][0]["input"] == deep


async def test_thoughts_are_items_of_their_own() -> None:
    thinking = engine("<think>", "So", ".", "</think>", "Yes")
    thinking.model = replace(WORD_MODEL, chat_template=TEMPLATE + "{# <think></think> #}")
    async with serving(thinking) as service:
        events = await stream(service, {"input": "Hi"})
        assert [event["type"].removeprefix("response.") for event in events[2:-1]] == [
            "output_item.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done",
            "output_item.done", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done",
        ]  # fmt: skip
        thought, message = events[-1]["response"]["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "So."}]
        assert thought["summary"] == []
        assert message["content"][0]["text"] == "Yes"
        assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1]
        assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"background": True, "store": False}, "background"),
        ({"background_options": {"completion_window": "2h"}}, "background_options.completion_window"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"input": []}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "x" * 100_000, "content": "Hi"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "action": nested(65)}]}, "input[0]"),
        ({"input": [{"type": "local_shell_call", "call_id": "a", "action": nested(65)}]}, "input[0]"),
        ({"tools": [{"type": "web_search", "filters": nested(65)}]}, "tools[0]"),
        ({"tool_choice": {"type": "function", "name": "f", "more": nested(65)}}, "tool_choice"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a"}, {"type": "custom", "name": "a"}]}, "tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"name": "a"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [TOOL, TOOL]}]}, "tools[0].tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "x": nested(67)}]}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a", "parameters": nested(2)}]}, "tools[0].parameters"),
        ({"tools": NAMESPACES, "tool_choice": {"type": "function", "name": "add"}}, "tool_choice.namespace"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(body: Any, field: str) -> None:
    async with serving(engine()) as service:
        found = await error(service, {"input": "Hi"} | body)
        assert (found["param"], found["type"]) == (field, "invalid_request_error"), found
        assert len(found["message"]) < 500
        assert not service.engine.streams


async def test_unknown_fields_and_hosted_tools_are_ignored() -> None:
    async with serving(engine()) as service:
        items = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Short."}]},
            {"role": "user", "content": "Hi", "unknown": 1},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "x"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Ok"}]},
            {"role": "user", "content": "On"},
        ]
        body = {
            "input": items, "instructions": "Be brief.", "include": ["reasoning.encrypted_content"], "fancy": [1],
            "store": False, "tools": [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}],
        }  # fmt: skip
        reply = await service.reply("/v1/responses", body)
        text = prompt_text(service.engine)
        assert text.startswith("[system]Be brief.\n\nShort.</s>[user]Hi</s>")
        assert text.endswith("[image]</s>[assistant]Ok</s>[user]On</s>[assistant]") or "[image]" in text
        async with service.client.get(f"/v1/responses/{reply['id']}") as missing:
            assert missing.status == 404, "it was not to be stored"


async def test_input_that_does_not_fit_says_so() -> None:
    async with serving(engine()) as service:
        for more in ({}, {"max_output_tokens": 5}, {"max_output_tokens": 5, "truncation": "auto"}):
            assert (await error(service, {"input": "x" * 600, **more}))["code"] == "context_length_exceeded"
        events = await stream(service, {"input": "x" * 600})
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
        assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"
        assert events[-1]["response"]["status"] == "failed"


async def test_truncation_leaves_out_the_oldest_turns_whole() -> None:
    items = [{"role": "system", "content": "S"}]
    for number in range(20):
        items += [{"role": "user", "content": f"{number:02}" + "x" * 20}, {"role": "assistant", "content": "a" * 20}]
    async with serving(engine()) as service:
        body = {"input": [*items, {"role": "user", "content": "Last"}], "truncation": "auto"}
        reply = await service.reply("/v1/responses", body)
        text = prompt_text(service.engine)
        turns = reply["truncated"]["turns"]
        assert len(reply["truncated"]["items"]) == 2 * turns
        assert text.startswith(f"[system]S</s>[user]{turns:02}x")
        assert text.endswith("[user]Last</s>[assistant]")
        assert 250 < len(service.engine.spec.prompt) <= 384
        limited = await service.reply("/v1/responses", body | {"max_output_tokens": 50})
        assert limited["truncated"]["turns"] == turns
        # The next turn begins alike, as long as it fits.
        again = {"input": "And", "previous_response_id": reply["id"], "truncation": "auto"}
        assert (await service.reply("/v1/responses", again))["truncated"] == reply["truncated"]
        again["truncation"] = "disabled"
        assert (await error(service, again))["code"] == "context_length_exceeded"
        assert (await error(service, {"input": "x" * 600, "truncation": "auto"}))["code"] == "context_length_exceeded"


async def test_a_response_can_be_listed_deleted_and_then_only_continued_by_its_children() -> None:
    async with serving(engine()) as service:
        first = await service.reply("/v1/responses", {"input": "One"})
        second = await service.reply("/v1/responses", {"input": "Two", "previous_response_id": first["id"]})
        async with service.client.get(f"/v1/responses/{second['id']}/input_items?order=asc&limit=2") as listed:
            page = await listed.json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["One", "Hello you"]
        assert page["has_more"] is True
        after = f"/v1/responses/{second['id']}/input_items?after={page['last_id']}&order=asc"
        async with service.client.get(after) as listed:
            assert [item["content"][0]["text"] for item in (await listed.json())["data"]] == ["Two"]
        async with service.client.delete(f"/v1/responses/{first['id']}") as deleted:
            assert await deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        for method in (service.client.get, service.client.delete):
            async with method(f"/v1/responses/{first['id']}") as missing:
                assert missing.status == 404
        await error(service, {"input": "x", "previous_response_id": first["id"]}, 404)
        await service.reply("/v1/responses", {"input": "Three", "previous_response_id": second["id"]})
        assert prompt_text(service.engine).startswith("[user]One")


async def test_a_running_response_can_be_read_and_cancelled() -> None:
    def script(_: GenerationSpec) -> Sequence[Step]:
        return [word("Hel", 310), Pause(), word("lo", 311), EOS_TOKEN]

    async with serving(ScriptedEngine(script=script, model=WORD_MODEL)) as service:
        response = await service.post("/v1/responses", {"input": "Hi", "stream": True})
        await response.content.readline()
        created = await response.content.readline()
        running = msgspec.json.decode(created.removeprefix(b"data: "))["response"]["id"]
        while (line := await response.content.readline()) != b"event: response.output_text.delta\n":
            assert line
        async with service.client.get(f"/v1/responses/{running}") as got:
            so_far = await got.json()
        assert (so_far["status"], so_far["output"][0]["content"][0]["text"]) == ("in_progress", "Hel")
        async with service.client.post(f"/v1/responses/{running}/cancel") as got:
            cancelled = await got.json()
        assert (cancelled["status"], cancelled["output"][0]["content"][0]["text"]) == ("cancelled", "Hel")
        rest = await response.text()
        assert "event: response.incomplete" in rest
        async with service.client.post(f"/v1/responses/{running}/cancel") as got:
            assert await got.json() == cancelled, "it was cancelled before"
        async with service.client.post("/v1/responses/resp_x/cancel") as got:
            assert got.status == 404
        await eventually(service.is_idle, "everything released")


async def test_a_turn_is_stored_whole_if_another_server_has_removed_what_it_continues(place: Place) -> None:
    made = engine()
    async with serving(made, store=Store(StoreSettings(place=place))) as service:
        first = await service.reply("/v1/responses", {"input": "Hi"})
        made.script = lambda _: [Pause(), word("Fine"), EOS_TOKEN]
        body = {"input": "How are you?", "previous_response_id": first["id"]}
        asked = asyncio.create_task(service.reply("/v1/responses", body))
        await eventually(lambda: len(made.streams) == 2, "it runs")
        other = Store(StoreSettings(place=place, max_bytes=1))
        assert await other.commit("", Transaction(node=Node(id="n", items=({"id": "i"},), response=b"{}")))
        assert await other.response("", first["id"]) is None
        await other.close()
        made.resume.set()
        second = await asked
        assert (second["status"], second["previous_response_id"]) == ("completed", first["id"])
        await service.reply("/v1/responses", {"input": "Bye", "previous_response_id": second["id"]})
        assert prompt_text(made).startswith(
            "[user]Hi</s>[assistant]<900><901></s>[user]How are you?</s>[assistant]Fine"
        )
        async with service.client.get(f"/v1/responses/{second['id']}/input_items") as response:
            assert len((await response.json())["data"]) == 3


async def test_a_response_that_has_ended_cannot_be_cancelled() -> None:
    async with serving(engine()) as service:
        ended = await service.reply("/v1/responses", {"input": "Hi"})
        response = await service.post(f"/v1/responses/{ended['id']}/cancel", {})
        assert (response.status, (await response.json())["error"]["message"]) == (
            400,
            f"Cannot cancel a synchronous response. It has ended, and its status is {ended['status']}",
        )
        async with service.client.get(f"/v1/responses/{ended['id']}") as got:
            assert await got.json() == ended


async def test_compaction_is_refused_by_name() -> None:
    async with serving(engine()) as service:
        response = await service.post("/v1/responses/compact", {"model": "toy", "input": "Hi"})
        assert response.status == 404
        assert (await response.json())["error"]["message"].startswith("/v1/responses/compact is not supported: ")


async def test_tokens_of_an_input_are_counted_without_generating() -> None:
    async with serving(engine()) as service:
        count = await service.reply("/v1/responses/input_tokens", {"input": "Hi", "instructions": "A"})
        assert count == {"object": "response.input_tokens", "input_tokens": 1 + len("[system]A#[user]Hi#[assistant]")}
        assert not service.engine.streams


async def test_keys_see_their_own_responses_only() -> None:
    async with serving(engine(), access=keys("a", "b")) as service:
        a, b = ({"Authorization": f"Bearer {name}"} for name in "ab")
        created = await service.client.post("/v1/responses", json={"input": "Hi"}, headers=a)
        path = f"/v1/responses/{(await created.json())['id']}"
        for method in (service.client.get, service.client.delete):
            assert (await method(path, headers=b)).status == 404
        assert (await service.client.get(f"{path}/input_items", headers=b)).status == 404
        assert (await service.client.post(f"{path}/cancel", headers=b)).status == 404
        body = {"input": "x", "previous_response_id": path.rpartition("/")[2]}
        assert (await service.client.post("/v1/responses", json=body, headers=b)).status == 404
        assert (await service.client.get(path, headers=a)).status == 200

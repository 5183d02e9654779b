"""The tool loop: the model calls tools of MCP servers, reads their results and goes on within one response."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

from caravan_dialects.auth.key import MIN_PRIORITY
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_dialects.tool_servers import TIMED_OUT, CallResult, ToolServerError
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, named_events, serving
from caravan_testing.scripted_engine import MODEL, Pause, ScriptedEngine, Step, letters
from caravan_testing.scripted_servers import ScriptedServers, tool
from caravan_testing.waiting import eventually

PATH = "/v1/responses"
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}[assistant]"
)
DEMO = {"type": "mcp", "server_label": "demo", "require_approval": "never"}
ADD = tool("add", reads=True, a="integer", b="integer")


def call(name: str, server: str = "demo", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': f'{server}__{name}', 'arguments': arguments})}\n</tool_call>"


def says(*outputs: str) -> ScriptedEngine:
    """Return an engine that generates one output after the other, the last one again and again."""
    engine = ScriptedEngine(model=replace(MODEL, chat_template=TEMPLATE, max_sequence_tokens=4096))
    engine.script = lambda _: letters(outputs[min(len(engine.streams), len(outputs) - 1)])
    return engine


def adding(**more: Any) -> ScriptedServers:
    functions: dict[str, Callable[..., Any]] = {"add": lambda a, b: str(a + b), "drop": lambda: "dropped"}
    return ScriptedServers({"demo": [ADD, tool("drop")]}, functions | more)


def prompt(engine: ScriptedEngine, at: int = -1) -> str:
    return "".join(chr(token_id - 100) for token_id in engine.streams[at].spec.prompt[1:])


def kinds(response: Any) -> list[str]:
    return [item["type"] for item in response["output"]]


async def reply(service: Service, **body: Any) -> Any:
    return await service.reply(PATH, {"input": "Hi", "tools": [DEMO], **body})


async def test_the_model_calls_a_tool_and_goes_on_with_its_result() -> None:
    engine, servers = says("Adding. " + call("add", a=1, b=2), "It is 3."), adding()
    async with serving(engine, tool_servers=servers) as service:
        found = await reply(service)
        assert found["status"] == "completed"
        listed, before, called, after = found["output"]
        assert (listed["type"], listed["server_label"], listed["error"]) == ("mcp_list_tools", "demo", None)
        assert [one["name"] for one in listed["tools"]] == ["add", "drop"]
        assert listed["tools"][0]["annotations"] == {"readOnlyHint": True}
        assert before["content"][0]["text"].strip() == "Adding."
        assert {key: called[key] for key in ("type", "status", "server_label", "name", "output", "error")} == {
            "type": "mcp_call", "status": "completed", "server_label": "demo", "name": "add", "output": "3",
            "error": None,
        }  # fmt: skip
        assert json.loads(called["arguments"]) == {"a": 1, "b": 2}
        assert after["content"][0]["text"] == "It is 3."
        assert servers.made == ["demo", ("demo", "add", {"a": 1, "b": 2})]
        # Cells are kept for the result, and the next prompt begins with all that there was.
        assert [stream.tools_called for stream in engine.streams] == [True, False]
        first, second = (stream.spec.prompt for stream in engine.streams)
        assert prompt(engine).endswith("[tool]3[assistant]")
        assert second[: len(first)] == first
        assert len({stream.spec.session for stream in engine.streams}) == 1
        usage = found["usage"]
        assert usage["input_tokens"] == len(first) + len(second)
        assert usage["output_tokens"] == sum(stream.sent for stream in engine.streams)
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert service.is_idle()


async def test_a_stream_tells_of_lists_and_calls_as_openai_does() -> None:
    engine = says(call("add", a=1, b=2), "3")
    async with serving(engine, tool_servers=adding()) as service:
        response = await service.post(PATH, {"input": "Hi", "tools": [DEMO], "stream": True})
        events = named_events(await response.text())
        told = [event["type"].removeprefix("response.") for event in events]
        arguments = [event for event in events if event["type"].endswith("arguments.delta")]
        assert [name for name in told if not name.endswith("arguments.delta")] == [
            "created", "in_progress",
            "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
            "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed",
            "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done", "completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert json.loads("".join(event["delta"] for event in arguments)) == {"a": 1, "b": 2}
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]


@pytest.mark.usefixtures("either_store")
async def test_a_line_of_a_batch_calls_tools_as_its_route_does() -> None:
    engine, servers = says(call("add", a=1, b=2), "It is 3."), adding()
    async with serving(engine, tool_servers=servers) as service:
        body = {"model": "scripted", "input": "Hi", "tools": [DEMO]}
        line = {"custom_id": "one", "method": "POST", "url": PATH, "body": body}
        form = FormData({"purpose": "batch"})
        form.add_field("file", json.dumps(line).encode(), filename="requests.jsonl")
        async with service.client.post("/v1/files", data=form) as response:
            file = (await response.json())["id"]
        batch = await service.reply(
            "/v1/batches", {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"}
        )

        async def now() -> Any:
            async with service.client.get(f"/v1/batches/{batch['id']}") as response:
                return await response.json()

        ended = await eventually(now, "the batch ends", lambda one: one["status"] in ("completed", "failed"))
        assert ended["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        async with service.client.get(f"/v1/files/{ended['output_file_id']}/content") as response:
            answered = json.loads(await response.text())["response"]["body"]
        assert kinds(answered) == ["mcp_list_tools", "mcp_call", "message"]
        assert answered["output"][-1]["content"][0]["text"] == "It is 3."
        assert servers.made == ["demo", ("demo", "add", {"a": 1, "b": 2})]
        # Both parts yield to every other request.
        assert {stream.spec.priority for stream in engine.streams} == {MIN_PRIORITY}
        await eventually(service.is_idle, "everything released")


async def test_later_responses_know_the_tools_and_the_results() -> None:
    engine, servers = says(call("add", a=1, b=2), "3", call("add", a=3, b=4), "7"), adding()
    async with serving(engine, tool_servers=servers) as service:
        first = await reply(service)
        second = await reply(service, previous_response_id=first["id"], input="And 3 and 4?")
        assert kinds(second) == ["mcp_call", "message"]
        assert [made for made in servers.made if made == "demo"] == ["demo"]
        assert "[tool]3[assistant]3[user]And 3 and 4?" in prompt(engine)
        # The same, with the whole history in the request.
        items = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "And 3 and 4?"}]
        third = await reply(service, input=items)
        assert kinds(third) == ["message"]
        assert prompt(engine) == prompt(engine, 2)


async def test_what_goes_wrong_is_an_item_that_the_model_reads() -> None:
    def fails(**_: Any) -> ToolServerError:
        return ToolServerError(TIMED_OUT, "no answer within 3 s")

    outputs = (
        call("add", a=1, b=2), call("drop"), call("drop") + "\n" + call("nothing"),
        '<tool_call>\n{"name": "demo__add", "arguments": [1]}\n</tool_call>', "Sorry",
    )  # fmt: skip
    engine, servers = says(*outputs), adding(add=fails, drop=lambda: CallResult(text="It is full", failed=True))
    async with serving(engine, tool_servers=servers) as service:
        found = await reply(service, parallel_tool_calls=True)
        calls = [item for item in found["output"] if item["type"] == "mcp_call"]
        assert found["status"] == "completed"
        assert calls[0]["error"] == {"type": "mcp_protocol_error", "code": TIMED_OUT, "message": "no answer within 3 s"}
        assert calls[1]["error"]["content"] == [{"type": "text", "text": "It is full"}]
        assert {one["status"] for one in calls} == {"failed"}
        assert {one["output"] for one in calls} == {None}
        assert "no answer within 3 s" in prompt(engine)
        assert "It is full" in prompt(engine)


async def test_a_server_without_a_list_is_an_item_and_the_model_goes_on_without_it() -> None:
    engine = says("Hello")
    servers = ScriptedServers({"demo": ToolServerError(TIMED_OUT, "no connection within 30 s"), "other": [ADD]})
    async with serving(engine, tool_servers=servers) as service:
        found = await reply(service, tools=[DEMO, {**DEMO, "server_label": "other"}])
        assert kinds(found) == ["mcp_list_tools", "mcp_list_tools", "message"]
        assert (found["output"][0]["tools"], found["output"][0]["error"]) == ([], "no connection within 30 s")
        assert prompt(engine).startswith("<tool>other__add</tool>")


@pytest.mark.parametrize(
    ("entry", "offered"),
    [
        ({"allowed_tools": ["drop"]}, ["demo__drop"]),
        ({"allowed_tools": {"read_only": True}}, ["demo__add"]),
        ({"allowed_tools": {"tool_names": ["add", "drop"], "read_only": False}}, ["demo__drop"]),
    ],
)
async def test_a_request_may_allow_some_tools_only(entry: Any, offered: list[str]) -> None:
    engine = says("Hello")
    async with serving(engine, tool_servers=adding()) as service:
        found = await reply(service, tools=[{**DEMO, **entry}])
        assert prompt(engine).startswith("".join(f"<tool>{name}</tool>" for name in offered) + "[user]")
        assert [f"demo__{one['name']}" for one in found["output"][0]["tools"]] == offered


async def test_calls_of_a_response_are_limited() -> None:
    engine, servers = says(call("add", a=1, b=2)), adding()
    servers.max_calls = 3
    async with serving(engine, tool_servers=servers) as service:
        found = await reply(service)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_tool_calls"})
        calls = [item for item in found["output"] if item["type"] == "mcp_call"]
        assert [one["output"] for one in calls] == ["3", "3", "3", None]
        assert "at most 3 calls" in calls[-1]["error"]["message"]
        assert len(servers.made) == 4
        engine.streams.clear()
        found = await reply(service, max_tool_calls=1)
        assert [item["output"] for item in found["output"] if item["type"] == "mcp_call"] == ["3", None]


async def test_the_limits_of_a_response_hold_for_all_its_parts() -> None:
    written = call("add", a=1, b=2)
    engine = says(written, "A long answer that goes on and on")
    async with serving(engine, tool_servers=adding()) as service:
        used = len(letters(written))
        found = await reply(service, max_output_tokens=used + 5)
        assert engine.spec.stopping.max_new_tokens == 5
        assert found["status"] == "completed"
        engine.streams.clear()
        found = await reply(service, max_output_tokens=used)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert kinds(found) == ["mcp_list_tools", "mcp_call"]
        assert found["output"][1]["output"] == "3"


async def test_results_that_do_not_fit_end_the_response() -> None:
    engine = says(call("add", a=1, b=2))
    async with serving(engine, tool_servers=adding(add=lambda **_: "x" * 5000)) as service:
        found = await reply(service)
        assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_context_length"})
        assert len(found["output"][-1]["output"]) == 5000


async def test_what_the_client_has_to_run_ends_the_response() -> None:
    written = call("add", a=1, b=2) + '\n<tool_call>\n{"name": "mine", "arguments": {}}\n</tool_call>'
    engine = says(written, "Fine")
    mine = {"type": "function", "name": "mine", "parameters": {"type": "object", "properties": {}}}
    async with serving(engine, tool_servers=adding()) as service:
        found = await reply(service, tools=[DEMO, mine])
        assert kinds(found) == ["mcp_list_tools", "mcp_call", "function_call"]
        assert found["output"][1]["output"] == "3"
        result = {"type": "function_call_output", "call_id": found["output"][2]["call_id"], "output": "ok"}
        found = await reply(service, tools=[DEMO, mine], previous_response_id=found["id"], input=[result])
        assert kinds(found) == ["message"]
        assert prompt(engine).endswith("[tool]ok[assistant]")


@pytest.mark.parametrize("stored", [True, False])
async def test_calls_wait_for_approval(stored: bool) -> None:
    engine, servers = says(call("drop"), "Done", call("drop"), "As you like"), adding()
    asking = {"type": "mcp", "server_label": "demo", "require_approval": {"never": {"read_only": True}}}

    async def answer(before: Any, **decision: Any) -> Any:
        given: list[Any] = [
            {"type": "mcp_approval_response", "approval_request_id": before["output"][-1]["id"], **decision}
        ]
        if stored:
            return await reply(service, tools=[asking], previous_response_id=before["id"], input=given)
        history = [{"role": "user", "content": "Hi"}, *before["output"]]
        return await reply(service, tools=[asking], input=history + given)

    async with serving(engine, tool_servers=servers) as service:
        first = await reply(service, tools=[asking], store=stored)
        assert (first["status"], kinds(first)) == ("completed", ["mcp_list_tools", "mcp_approval_request"])
        assert servers.made == ["demo"]
        second = await answer(first, approve=True)
        called = second["output"][0]
        assert (called["type"], called["output"]) == ("mcp_call", "dropped")
        assert servers.made[1:] == [("demo", "drop", {})]
        assert prompt(engine).endswith("[tool]dropped[assistant]")
        if stored:
            assert called["approval_request_id"] == first["output"][-1]["id"]
            # It has been made: the same answer again makes no call.
            third = await reply(service, tools=[asking], previous_response_id=second["id"], input="Again")
            assert kinds(third) == ["mcp_approval_request"]
            last = await answer(third, approve=False, reason="not today")
        else:
            engine.streams.pop()
            last = await answer(first, approve=False, reason="not today")
        assert last["output"][0]["error"]["message"] == "the user did not approve the call: not today"
        assert "not today" in prompt(engine)
        assert len(servers.made) == 2


@pytest.mark.parametrize(
    ("entry", "field", "word_of_error"),
    [
        ({"server_url": "https://example.com/mcp"}, "tools[0].server_url", "server_label"),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id", "server_label"),
        ({"tunnel_id": "t"}, "tools[0].tunnel_id", "server_label"),
        ({"authorization": "secret"}, "tools[0].authorization", "server_label"),
        ({"server_label": "nonesuch"}, "tools[0].server_label", "demo"),
        ({"server_label": None}, "tools[0].server_label", "str"),
        ({"require_approval": "sometimes"}, "tools[0].require_approval", "sometimes"),
    ],
)
async def test_what_is_not_configured_is_refused_by_name(entry: Any, field: str, word_of_error: str) -> None:
    async with serving(says("Hello"), tool_servers=adding()) as service:
        response = await service.post(PATH, {"input": "Hi", "tools": [{**DEMO, **entry}]})
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, field)
        assert word_of_error in error["message"]
        assert "secret" not in error["message"]


async def test_a_server_is_named_once() -> None:
    async with serving(says("Hello"), tool_servers=adding()) as service:
        response = await service.post(PATH, {"input": "Hi", "tools": [DEMO, DEMO]})
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, "tools[1].server_label")
        assert "must be another one than that of other tools. Given: 'demo'" in error["message"]


async def test_a_tool_can_be_required_once() -> None:
    engine = says(call("add", a=1, b=2), "3")
    async with serving(engine, tool_servers=adding()) as service:
        found = await reply(service, tool_choice={"type": "mcp", "server_label": "demo", "name": "add"})
        assert kinds(found) == ["mcp_list_tools", "mcp_call", "message"]
        assert [stream.spec.constraint is not None for stream in engine.streams] == [True, False]


async def test_prompts_with_tools_of_servers_are_counted() -> None:
    async with serving(says("Hello"), tool_servers=adding()) as service:
        counts = [
            (await service.reply(f"{PATH}/input_tokens", {"input": "Hi", "tools": tools}))["input_tokens"]
            for tools in ([], [DEMO])
        ]
        assert counts[1] - counts[0] == len("<tool>demo__add</tool><tool>demo__drop</tool>")


async def test_a_websocket_has_the_loop_too() -> None:
    engine, servers = says(call("add", a=1, b=2), "3"), adding()
    async with serving(engine, tool_servers=servers) as service, service.client.ws_connect(PATH) as socket:
        await socket.send_json({"type": "response.create", "input": "Hi", "tools": [DEMO], "store": False})
        while (event := await socket.receive_json())["type"] != "response.completed":
            assert event["type"] not in ("error", "response.failed"), event
        assert kinds(event["response"]) == ["mcp_list_tools", "mcp_call", "message"]
        # What is not stored can be continued on its connection.
        more = {"previous_response_id": event["response"]["id"], "input": "Again", "store": False}
        await socket.send_json({"type": "response.create", "tools": [DEMO], **more})
        while (event := await socket.receive_json())["type"] != "response.completed":
            assert event["type"] not in ("error", "response.failed"), event
        assert kinds(event["response"]) == ["message"]
        assert servers.made.count("demo") == 1


async def test_a_cancelled_response_keeps_what_it_has() -> None:
    engine, servers = says(call("add", a=1, b=2), "3"), adding()
    servers.resume = asyncio.Event()
    async with serving(engine, tool_servers=servers) as service:
        queued = await reply(service, background=True)
        await eventually(lambda: servers.under_way, "the call is under way")
        found = await service.reply(f"{PATH}/{queued['id']}/cancel", None)
        assert (found["status"], kinds(found)) == ("cancelled", ["mcp_list_tools", "mcp_call"])
        assert found["output"][1]["status"] == "incomplete"
        assert not servers.under_way
        await eventually(service.is_idle, "everything released")


async def test_a_client_that_leaves_ends_the_call() -> None:
    engine, servers = says(call("add", a=1, b=2), "3"), adding()
    servers.resume = asyncio.Event()
    async with serving(engine, tool_servers=servers) as service:
        async with service.client.post(PATH, json={"input": "Hi", "tools": [DEMO], "stream": True}) as response:
            await eventually(lambda: servers.under_way, "the call is under way")
            response.close()
        await eventually(lambda: not servers.under_way, "the call ends")
        await eventually(service.is_idle, "everything released")


# In the background


async def ended(service: Service, response_id: str) -> Any:
    async def found() -> Any:
        async with service.client.get(f"{PATH}/{response_id}") as response:
            return await response.json()

    return await eventually(found, "it ends", lambda one: one["status"] not in ("queued", "in_progress"))


async def events_of(service: Service, response_id: str) -> list[Any]:
    async with service.client.get(f"{PATH}/{response_id}", params={"stream": "true"}) as response:
        return named_events(await response.text())


async def test_a_response_in_the_background_calls_tools() -> None:
    engine = says(call("add", a=1, b=2), "It is 3.")
    async with serving(engine, tool_servers=adding()) as service:
        queued = await reply(service, background=True)
        whole = await ended(service, queued["id"])
        assert (whole["status"], kinds(whole)) == ("completed", ["mcp_list_tools", "mcp_call", "message"])
        events = await events_of(service, queued["id"])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == whole["output"] == events[-1]["response"]["output"]
        await eventually(service.is_idle, "everything released")


async def test_the_next_router_goes_on_between_calls_and_repeats_none(tmp_path: Path) -> None:
    settings = StoreSettings(place=tmp_path / "state")
    outputs = (call("add", a=1, b=2), call("add", a=3, b=4), "Done, and done well.")
    servers = adding()

    def script(engine: ScriptedEngine, start: int, after: int | None) -> None:
        """Generate ``outputs`` from ``start`` on; stop after so many letters of the last one."""

        def steps(spec: GenerationSpec) -> Sequence[Step]:
            at = start + len(engine.streams)
            made = letters(outputs[at])
            return made if after is None or at < 2 else [*made[:after], Pause(), *made[after:]]

        engine.script = steps

    first = says("")
    script(first, 0, None)
    servers.resume = asyncio.Event()
    async with serving(first, store=Store(settings), tool_servers=servers) as service:
        queued = await reply(service, background=True, tools=[DEMO])
        await eventually(lambda: servers.under_way, "the first call is under way")
    # The router ended in the first call: it may have been made, so it is not repeated.
    second = says("")
    script(second, 1, 3)
    servers.resume = None
    async with serving(second, store=Store(settings), tool_servers=servers) as service:
        await eventually(lambda: len(second.streams) == 2 and second.streams[1].sent == 3, "the last part has begun")
    third = says("")
    script(third, 2, None)
    async with serving(third, store=Store(settings), tool_servers=servers) as service:
        whole = await ended(service, queued["id"])
        assert kinds(whole) == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
        assert "may have been made" in whole["output"][1]["error"]["message"]
        assert whole["output"][2]["output"] == "7"
        assert whole["output"][3]["content"][0]["text"] == outputs[2]
        assert [made[2] for made in servers.made if made != "demo"] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert third.spec.prompt == second.streams[1].spec.prompt
        assert third.spec.continued is not None
        assert len(third.spec.continued.token_ids) == 3
        events = await events_of(service, queued["id"])
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text == outputs[2]
        await eventually(service.is_idle, "everything released")

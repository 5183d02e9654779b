"""Tools of responses: in namespaces, added by items, and those that nobody here runs."""

import json
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from caravan_testing.http_server import Service, named_events, serving
from caravan_testing.scripted_engine import EOS_TOKEN, MODEL, ScriptedEngine, word

RESPONSES = "/v1/responses"
TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, **more}


def namespace(name: str, *tools: Any, **more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": f"About {name}", "tools": list(tools), **more}


MCP = namespace("mcp__demo", function("weather"), function("time"))
AGENTS = namespace("agents", function("weather"), {"type": "custom", "name": "patch"})


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=replace(MODEL, chat_template=TEMPLATE, max_sequence_tokens=4096))


@pytest.fixture
async def service(engine: ScriptedEngine) -> AsyncIterator[Service]:
    says(engine, "Yes")
    async with serving(engine) as running:
        yield running
        assert running.is_idle()


def says(engine: ScriptedEngine, text: str) -> None:
    engine.script = lambda _: [*(word(text[at : at + 3]) for at in range(0, len(text), 3)), EOS_TOKEN]


def calls(engine: ScriptedEngine, *names: str, **arguments: Any) -> None:
    """Let the model call these tools."""
    written = [json.dumps({"name": name, "arguments": arguments}) for name in names]
    says(engine, "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written))


def text_of(engine: ScriptedEngine) -> str:
    return "".join(chr(token_id - 100) for token_id in engine.spec.prompt[1:])


def offered(engine: ScriptedEngine) -> list[str]:
    """Return the names of the tools in the last prompt."""
    parts = text_of(engine).split("</tool>")[:-1]
    return [json.loads(part.removeprefix("<tool>"))["function"]["name"] for part in parts]


async def reply(service: Service, **body: Any) -> dict[str, Any]:
    answered: dict[str, Any] = await service.reply(RESPONSES, {"input": "Hi", **body})
    return answered


async def test_tools_of_namespaces_are_offered_by_names_of_their_own(service: Service, engine: ScriptedEngine) -> None:
    counts = [(await reply(service))["usage"]["input_tokens"]]
    tools, answered = list[Any](), dict[str, Any]()
    for tool in (function("weather"), MCP, AGENTS):
        tools.append(tool)
        answered = await reply(service, tools=tools)
        counts.append(answered["usage"]["input_tokens"])
    assert offered(engine) == ["weather", "mcp__demo__weather", "mcp__demo__time", "agents__weather", "agents__patch"]
    assert counts == sorted(set(counts))
    assert text_of(engine).count("About mcp__demo") == 1
    assert answered["tools"][1:] == [MCP, AGENTS]
    counted = await service.reply(f"{RESPONSES}/input_tokens", {"input": "Hi", "tools": tools})
    assert counted["input_tokens"] == counts[-1]


async def test_calls_have_their_namespace_and_bare_name_everywhere(service: Service, engine: ScriptedEngine) -> None:
    calls(engine, "mcp__demo__weather", "weather", "agents__weather", city="Rome")
    tools = [function("weather"), MCP, AGENTS]
    response = await service.post(RESPONSES, {"input": "Hi", "tools": tools, "stream": True})
    events = named_events(await response.text())
    done = events[-1]["response"]
    named = [(call.get("namespace"), call["name"], call["arguments"]) for call in done["output"]]
    assert named == [(space, "weather", '{"city": "Rome"}') for space in ("mcp__demo", None, "agents")]
    for kind in ("added", "done"):
        items = [event["item"] for event in events if event["type"] == f"response.output_item.{kind}"]
        assert [(item.get("namespace"), item["name"]) for item in items] == [named[at][:2] for at in range(3)]
    ended = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in ended] == ["weather"] * 3
    whole = await reply(service, tools=tools)
    assert [(call.get("namespace"), call["name"]) for call in whole["output"]] == [one[:2] for one in named]
    async with service.client.get(f"{RESPONSES}/{whole['id']}") as stored:
        assert (await stored.json())["output"] == whole["output"]
    # The next turn shows the model the names that it wrote, whether the items are stored or sent again.
    says(engine, "Fine")
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in whole["output"]
    ]
    shown = 'mcp__demo__weather({"city": "Rome"})weather({"city": "Rome"})agents__weather({"city": "Rome"})'
    await reply(service, input=results, previous_response_id=whole["id"], tools=tools)
    assert shown in text_of(engine)
    sent = [{"role": "user", "content": "Hi"}, *whole["output"], *results]
    again = await reply(service, input=sent, tools=tools)
    assert shown in text_of(engine)
    await reply(service, input=sent)
    assert shown in text_of(engine), "also when they are offered no longer"
    async with service.client.get(f"{RESPONSES}/{again['id']}/input_items?order=asc") as listed:
        items = (await listed.json())["data"]
    assert [item.get("namespace") for item in items[1:4]] == ["mcp__demo", None, "agents"]


async def test_custom_tools_may_be_in_namespaces(service: Service, engine: ScriptedEngine) -> None:
    calls(engine, "agents__patch", input="a")
    [call] = (await reply(service, tools=[AGENTS]))["output"]
    assert (call["type"], call["namespace"], call["name"], call["input"]) == (
        "custom_tool_call",
        "agents",
        "patch",
        "a",
    )
    says(engine, "Fine")
    await reply(service, input=[{"role": "user", "content": "Hi"}, call])
    assert 'agents__patch({"input": "a"})' in text_of(engine)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "time"}, {"mcp__demo__time"}),
        ({"type": "function", "name": "mcp__demo__time"}, {"mcp__demo__time"}),
        ({"type": "function", "name": "weather"}, {"weather"}),
        ({"type": "function", "name": "weather", "namespace": "agents"}, {"agents__weather"}),
        ({"type": "custom", "name": "patch"}, {"agents__patch"}),
    ],
)
async def test_a_tool_of_a_namespace_can_be_demanded(
    service: Service, engine: ScriptedEngine, choice: Any, names: set[str]
) -> None:
    await reply(service, tools=[function("weather"), MCP, AGENTS], tool_choice=choice)
    constraint = engine.spec.constraint
    assert constraint is not None
    known = {"weather", "mcp__demo__weather", "mcp__demo__time", "agents__weather", "agents__patch"}
    assert {name for name in known if re.search(rf"\b{name}\b", constraint.source)} == names


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ([{"type": "namespace", "name": "mcp__demo"}], ["mcp__demo__weather", "mcp__demo__time"]),
        ([{"type": "function", "name": "time"}, {"type": "mcp", "server_label": "x"}], ["mcp__demo__time"]),
        ([{"type": "function", "name": "weather", "namespace": "agents"}], ["agents__weather"]),
    ],
)
async def test_tools_of_namespaces_can_be_allowed(
    service: Service, engine: ScriptedEngine, allowed: Any, names: list[str]
) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    await reply(service, tools=[MCP, AGENTS], tool_choice=choice)
    assert offered(engine) == names


async def test_a_tool_of_no_namespace_is_not_found(service: Service) -> None:
    choice = {"type": "function", "name": "weather", "namespace": "other"}
    response = await service.post(RESPONSES, {"input": "Hi", "tools": [MCP], "tool_choice": choice})
    assert (response.status, (await response.json())["error"]["message"]) == (
        400,
        "Tool error: Tool with name weather not found",
    )


async def test_items_add_tools_for_all_turns_after_them(service: Service, engine: ScriptedEngine) -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [function("clock"), MCP, function("a b"), 5]}
    user = {"role": "user", "content": "Hi"}
    first = await reply(service, input=[user, added], tools=[function("weather")])
    assert offered(engine) == ["weather", "clock", "mcp__demo__weather", "mcp__demo__time"]
    searched = {"type": "tool_search_output", "call_id": "s", "tools": [AGENTS, function("clock")]}
    tools = [function("weather")]
    await reply(service, input=[searched, user], previous_response_id=first["id"], tools=tools)
    assert offered(engine)[4:] == ["agents__weather", "agents__patch"]
    assert "Found tools: agents__weather, agents__patch, clock" in text_of(engine)
    calls(engine, "mcp__demo__time")
    [call] = (await reply(service, input=[added, user]))["output"]
    assert (call["namespace"], call["name"]) == ("mcp__demo", "time")


async def test_the_model_may_ask_the_client_for_tools(service: Service, engine: ScriptedEngine) -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools"}
    tools = [search, function("weather")]
    calls(engine, "tool_search", query="time")
    response = await service.post(RESPONSES, {"input": "Hi", "tools": tools, "stream": True})
    events = named_events(await response.text())
    assert offered(engine) == ["tool_search", "weather"]
    kinds = [event["type"].removeprefix("response.") for event in events[2:]]
    assert kinds == ["output_item.added", "output_item.done", "completed"]
    [call] = events[-1]["response"]["output"]
    assert (call["type"], call["execution"], call["arguments"]) == ("tool_search_call", "client", {"query": "time"})
    assert events[2]["item"] == call | {"status": "in_progress", "arguments": {}}
    found = {"type": "tool_search_output", "call_id": call["call_id"], "execution": "client", "tools": [MCP]}
    calls(engine, "mcp__demo__time")
    previous = events[-1]["response"]["id"]
    [called] = (await reply(service, input=[found], previous_response_id=previous, tools=tools))["output"]
    assert (called["namespace"], called["name"]) == ("mcp__demo", "time")
    asked = 'tool_search({"query": "time"})[tool]Found tools: mcp__demo__weather, mcp__demo__time'
    assert asked in text_of(engine)
    deep = "[" * 80 + "]" * 80
    says(engine, f'<tool_call>\n{{"name": "tool_search", "arguments": {{"a": {deep}}}}}\n</tool_call>')
    [call] = (await reply(service, tools=tools))["output"]
    assert call["arguments"] == {"query": f'{{"a": {deep}}}'}, "what a client cannot send again"
    # A function of this name is a function, and a search of the server is left out.
    calls(engine, "tool_search", query="time")
    for others in ([function("tool_search"), search], [function("tool_search"), {"type": "tool_search"}]):
        [call] = (await reply(service, tools=others))["output"]
        assert call["type"] == "function_call"


async def test_what_is_left_out_is_logged_once(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tools = [{"type": "web_search"}, {"type": "code_interpreter"}, namespace("n", {"type": "mcp"}, function("f"))]
    for _ in range(2):
        await reply(
            service,
            input=[{"role": "user", "content": "Hi"}, {"type": "ghost_snapshot", "commit": {}}],
            tools=[*tools, {"type": "image_generation"}],
        )
    noted = [entry.getMessage() for entry in caplog.records if "ignored" in entry.getMessage()]
    kinds = ("code_interpreter", "image_generation", "mcp", "web_search")
    expected = [f"ignored '{kind}' in tools of {RESPONSES}" for kind in kinds]
    assert sorted(noted) == sorted([*expected, f"ignored 'ghost_snapshot' in items of {RESPONSES}"])

"""Tools: how the prompt describes them, how the output is constrained, and how calls are parsed."""

import json
from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.messages.constraint import ConstraintKind
from caravan_proto.messages.results import FinishReason
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import EOS_TOKEN, MODEL, ScriptedEngine, letters, word

HERMES = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> Answer <tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
EXCLUSIVE = "Grammar and tools are mutually exclusive, unless it is a JSON schema."
# What surrounds the schema of a call in the grammar.
_BEFORE, _BEHIND = "call_0: %json ", ' "\\n</tool_call>"'


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(
        model=replace(MODEL, chat_template=HERMES, max_sequence_tokens=4096), script=lambda _: letters(CALL)
    )


def text_of(engine: ScriptedEngine) -> str:
    return "".join(chr(token_id - 100) for token_id in engine.spec.prompt[1:])


async def chat(service: Service, messages: Any = HI, **body: Any) -> dict[str, Any]:
    body = {"messages": messages, "tools": [WEATHER, CLOCK], **body}
    [choice] = (await service.reply("/v1/chat/completions", body))["choices"]
    assert isinstance(choice, dict)
    return choice


async def stream(service: Service, **body: Any) -> list[Any]:
    return await service.events(
        "/v1/chat/completions", {"messages": HI, "tools": [WEATHER, CLOCK], "stream": True, **body}
    )


async def test_a_whole_call(service: Service, engine: ScriptedEngine) -> None:
    choice = await chat(service)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert len(call["id"]) == len("call_") + 24
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": '{"city": "Łódź"}'})
    assert '"name": "weather"' in text_of(engine)
    assert engine.spec.constraint is None
    assert engine.streams[0].tools_called


async def test_a_streamed_call_equals_the_whole_one(service: Service) -> None:
    *chunks, done = await stream(service)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert {call["index"] for call in calls} == {0}
    assert (calls[0]["type"], calls[0]["function"]["name"]) == ("function", "weather")
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])
    assert len(calls) > 3
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Łódź"}'
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "tool_calls"]
    assert not any(delta.get("content") for delta in deltas)


async def test_a_chunk_has_one_entry_for_each_call(service: Service, engine: ScriptedEngine) -> None:
    # The stop string starts with both calls, so they are held back and sent together.
    engine.script = lambda _: letters(CALL + CALL)
    stop = CALL + CALL + "!"
    chunk, _ = await stream(service, stop=stop[:255])
    calls = chunk["choices"][0]["delta"]["tool_calls"]
    assert [(call["index"], call["function"]["arguments"]) for call in calls] == [
        (0, '{"city": "Łódź"}'),
        (1, '{"city": "Łódź"}'),
    ]
    assert chunk["choices"][0]["finish_reason"] == "tool_calls"


async def test_text_before_a_call_streams_as_text(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters(f"Let me look. {CALL}")
    choice = await chat(service)
    assert choice["message"]["content"] == "Let me look."
    assert len(choice["message"]["tool_calls"]) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in (await stream(service))[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me look."


async def test_an_output_without_a_call_is_text(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters("Just <tool talk.")
    choice = await chat(service)
    assert choice["message"] == {"role": "assistant", "content": "Just <tool talk."}
    assert choice["finish_reason"] == "stop"


async def test_a_truncated_call_has_the_finish_reason_length(service: Service, engine: ScriptedEngine) -> None:
    tokens = letters(CALL[:55])[:-1]
    engine.script = lambda _: [*tokens, word("x", finish=FinishReason.LENGTH)]
    choice = await chat(service)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"ci')


async def test_a_control_token_may_mark_calls(engine: ScriptedEngine) -> None:
    engine.model = replace(MODEL, chat_template=HERMES + "[TOOL_CALLS]", max_sequence_tokens=4096)
    engine.script = lambda _: [
        word("[TOOL_CALLS]", special=True),
        *letters('[{"name": "clock", "arguments": {}}]'),
    ]
    async with serving(engine) as service:
        choice = await chat(service)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}


async def test_the_text_of_a_control_token_opens_no_call(engine: ScriptedEngine) -> None:
    engine.controls = {"<tool_call>": 900, "</tool_call>": 901}
    async with serving(engine) as service:
        copied = await chat(service)
        body = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
        engine.script = lambda _: [
            word("<tool_call>", special=True),
            *letters(body)[:-1],
            word("</tool_call>", special=True),
            EOS_TOKEN,
        ]
        called = await chat(service)
    assert (copied["message"]["content"], copied["finish_reason"]) == (CALL, "stop")
    assert called["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert called["message"]["content"] is None


@pytest.mark.parametrize("ending", ["", "</think>", "</think>\n\n"])
async def test_a_call_at_the_end_of_a_thought_is_a_call(engine: ScriptedEngine, ending: str) -> None:
    engine.model = replace(MODEL, chat_template=HERMES + "<think></think>", max_sequence_tokens=4096)
    engine.script = lambda _: letters(f"<think>Let me look.\n{CALL}{ending}")
    async with serving(engine) as service:
        choice = await chat(service)
        chunks = (await stream(service))[:-1]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me look.", None)
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Łódź"}'}
    assert choice["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_in_a_thought_before_an_answer_is_a_thought(engine: ScriptedEngine) -> None:
    engine.model = replace(MODEL, chat_template=HERMES + "<think></think>", max_sequence_tokens=4096)
    engine.script = lambda _: letters(f"<think>I could write {CALL}</think>It rains.")
    async with serving(engine) as service:
        choice = await chat(service)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (f"I could write {CALL}", "It rains.")
    assert choice["finish_reason"] == "stop"


async def test_without_parallel_tool_calls_the_first_call_ends_the_output(
    service: Service, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: letters(CALL + CALL)
    assert len((await chat(service))["message"]["tool_calls"]) == 2
    choice = await chat(service, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    # The second call was not generated.
    assert engine.streams[-1].sent < len(letters(CALL + CALL)) - 10
    chunks = (await stream(service, parallel_tool_calls=False))[:-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["clock", {"type": "function", "function": {"name": "clock"}}])
async def test_a_named_tool_must_be_called(service: Service, engine: ScriptedEngine, choice: Any) -> None:
    engine.script = lambda _: letters('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
    reply = await chat(service, tool_choice=choice)
    assert reply["finish_reason"] == "tool_calls"
    constraint = engine.spec.constraint
    assert constraint is not None
    assert constraint.kind is ConstraintKind.LARK
    assert '"clock"' in constraint.source
    assert "weather" not in constraint.source
    assert '"weather"' in text_of(engine)


async def test_some_tool_must_be_called(service: Service, engine: ScriptedEngine) -> None:
    await chat(service, tool_choice="required")
    constraint = engine.spec.constraint
    assert constraint is not None
    lines = constraint.source.splitlines()
    assert lines[0] == 'start: call ("\\n" call)*'
    assert lines[3:] == ["opened: call_0 | call_1", 'call: "<tool_call>\\n" opened']
    schema = json.loads(lines[1].removeprefix(_BEFORE).removesuffix(_BEHIND))
    arguments = SCHEMA | {"additionalProperties": False}
    assert schema["properties"] == {"name": {"const": "weather"}, "arguments": arguments}
    await chat(service, tool_choice="required", parallel_tool_calls=False)
    assert engine.spec.constraint is not None
    assert engine.spec.constraint.source.startswith("start: call\n")


async def test_the_constraint_names_control_tokens_by_id(service: Service, engine: ScriptedEngine) -> None:
    engine.controls = {"<tool_call>": 900, "</tool_call>": 901}
    await chat(service, tool_choice="required")
    assert engine.spec.constraint is not None
    lines = engine.spec.constraint.source.splitlines()
    assert lines[1].endswith('} "\\n" <[901]>')
    assert lines[-1] == 'call: <[900]> "\\n" opened'


async def test_definitions_of_a_parameter_schema_move_to_the_root_of_the_call_schema(
    service: Service, engine: ScriptedEngine
) -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    await chat(service, tools=[tool], tool_choice="required")
    assert engine.spec.constraint is not None
    schema = json.loads(engine.spec.constraint.source.splitlines()[1].removeprefix(_BEFORE).removesuffix(_BEHIND))
    assert schema["$defs"] == {"A": {"type": "integer"}}
    assert "$defs" not in schema["properties"]["arguments"]


async def test_an_answer_to_a_schema_may_take_the_place_of_calls(service: Service, engine: ScriptedEngine) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    await chat(service, response_format=schema)
    assert engine.spec.constraint is not None
    lines = engine.spec.constraint.source.splitlines()
    assert lines[0] == "start: calls | answer"
    assert json.loads(lines[2].removeprefix("answer: %json "))["properties"] == SCHEMA["properties"]
    await chat(service, response_format=schema, tool_choice="required")
    assert "answer" not in engine.spec.constraint.source


@pytest.mark.parametrize("choice", [None, "auto"])
async def test_calls_of_strict_tools_match_their_schemas_behind_any_text(
    service: Service, engine: ScriptedEngine, choice: str | None
) -> None:
    engine.controls = {"<tool_call>": 900, "</tool_call>": 901}
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    lax = {"type": "function", "function": {"name": "clock", "strict": False}}
    await chat(service, tools=[lax], tool_choice=choice)
    assert engine.spec.constraint is None
    await chat(service, tools=[strict, lax], tool_choice=choice)
    assert engine.spec.constraint is not None
    lines = engine.spec.constraint.source.splitlines()
    assert lines[0] == "start: TEXT? (section)?"
    assert json.loads(lines[3].removeprefix(_BEFORE).removesuffix(' "\\n" <[901]>'))["properties"]["arguments"] == (
        SCHEMA | {"additionalProperties": False}
    )
    # Nothing opens the calls of this one.
    engine.model = replace(engine.model, chat_template="{{ tools }}")
    await chat(service, tools=[strict])
    assert engine.spec.constraint is None


async def test_with_tool_choice_none_the_prompt_has_no_tools(service: Service, engine: ScriptedEngine) -> None:
    choice = await chat(service, tool_choice="none", response_format={"type": "json_object"})
    assert choice["message"]["content"] == CALL
    assert text_of(engine) == "[user]hi"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tool_choice": "g"}, "Tool error: Tool with name g not found"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "Tool error: Tool with name g not found"),
        ({"tool_choice": "required", "tools": []}, "Tool error: `tool_choice` is `required`, but there are no `tools`"),
        ({"guided_regex": "a"}, f"Tool error: {EXCLUSIVE} Given: `tools` and `guided_regex`"),
    ],
)  # fmt: skip
async def test_impossible_tool_choices_are_refused(
    service: Service, engine: ScriptedEngine, body: dict[str, Any], message: str
) -> None:
    sent = {"messages": HI, "tools": [WEATHER], **body}
    response = await service.post("/v1/chat/completions", sent)
    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["message"], error["code"]) == (message, "tool_error")
    assert not engine.streams


async def test_an_empty_tool_list_allows_a_response_format(service: Service, engine: ScriptedEngine) -> None:
    await chat(service, tools=[], response_format={"type": "json_object"})
    assert engine.spec.constraint is not None


async def test_a_schema_that_does_not_compile_is_a_tool_error(service: Service, engine: ScriptedEngine) -> None:
    engine.problem = lambda _: "too deep"
    response = await service.post(
        "/v1/chat/completions", {"messages": HI, "tools": [WEATHER], "tool_choice": "required"}
    )
    assert response.status == 400
    assert (await response.json())["error"]["message"] == (
        "Tool error: `tools[0].function.parameters` cannot be enforced: too deep"
    )


HISTORY = [
    *HI,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}},
            {"id": 7, "type": "function", "function": {"name": "clock", "arguments": '{"cut'}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": 7, "content": [{"type": "text", "text": "noon"}]},
]


async def test_earlier_calls_reach_a_template_that_supports_tools(service: Service, engine: ScriptedEngine) -> None:
    await chat(service, HISTORY)
    assert text_of(engine).endswith('[user]hi[assistant]weather({"city": "x"})clock("{\\"cut")[tool]rain[tool]noon')


async def test_the_router_describes_tools_to_a_template_without_them(engine: ScriptedEngine) -> None:
    engine.model = replace(MODEL, chat_template=PLAIN, max_sequence_tokens=4096)
    engine.script = lambda _: letters('{"name": "weather", "arguments": {"city": "x"}}')
    async with serving(engine) as service:
        choice = await chat(service, HISTORY)
        shown = text_of(engine)
        await chat(service, [{"role": "system", "content": "S"}, *HI], tool_prompt="Do it so:")
        with_system = text_of(engine)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "x"}'}
    assert shown.startswith('[user]You may call these functions:\n{"name":"weather","description":"d",')
    assert shown.endswith(
        '\n\nhi[assistant]{"name": "weather", "arguments": {"city": "x"}}\n{"name": "clock", "arguments": "{\\"cut"}'
        "[user]Result of weather: rain\nResult of clock: noon"
    )
    assert with_system.startswith("[system]S\n\nYou may call these functions:\n")
    assert with_system.endswith("\nDo it so:[user]hi")


async def test_call_ids_for_mistral_have_nine_characters(engine: ScriptedEngine) -> None:
    template = (
        "{{ tools | length }}[TOOL_CALLS]"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}"
        "{{ m.tool_call_id }} {% endfor %}"
    )
    engine.model = replace(MODEL, chat_template=template, max_sequence_tokens=4096)
    async with serving(engine) as service:
        await chat(service, HISTORY)
    one, other, one_again, other_again = text_of(engine).partition("]")[2].split()
    assert (one, other) == (one_again, other_again)
    assert len(one) == len(other) == 9


async def test_requests_with_tools_use_the_tool_template(engine: ScriptedEngine) -> None:
    engine.model = replace(MODEL, chat_template=PLAIN, tool_template="T" + HERMES, max_sequence_tokens=4096)
    async with serving(engine) as service:
        await chat(service)
        assert text_of(engine).startswith("T<tools>")
        await chat(service, tools=None)
        assert text_of(engine) == "[user]hi"


def allowing(mode: str, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


async def test_only_allowed_tools_are_called(service: Service, engine: ScriptedEngine) -> None:
    await chat(service)
    prompt = text_of(engine)
    for mode, called in (("auto", None), ("required", "clock")):
        choice = await chat(service, tool_choice=allowing(mode, "clock"))
        assert text_of(engine) == prompt, "a cache keeps its prefix"
        assert choice["finish_reason"] == "stop", "the call of another function is text"
        constraint = engine.spec.constraint
        assert (constraint is None) == (called is None)
        assert constraint is None or ("clock" in constraint.source and "city" not in constraint.source)
    assert (await chat(service, tool_choice=allowing("auto", "weather", "clock")))["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (allowing("auto", "other"), "Tool with name other not found"),
        (allowing("required"), "there are no `tool_choice.allowed_tools.tools`"),
        ({"type": "allowed_tools"}, "`tool_choice.allowed_tools`"),
        ({"type": "function"}, "`tool_choice.function`"),
    ],
)
async def test_a_choice_that_names_nothing_is_refused(service: Service, choice: dict[str, Any], message: str) -> None:
    response = await service.post("/v1/chat/completions", {"messages": HI, "tools": [WEATHER], "tool_choice": choice})
    assert response.status == 400
    assert message in await response.text()

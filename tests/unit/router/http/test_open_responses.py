"""What the Open Responses specification requires of each response, item and event, for its own kinds of requests.

Its schemas are at openresponses.org; a field that is null is there all the same.
"""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from caravan_testing.http_server import Service, named_events, serving
from caravan_testing.scripted_engine import EOS_TOKEN, SEEING_MODEL, ScriptedEngine, Step, ids_of, word
from caravan_testing.seen_prompts import data_url

RESPONSES = "/v1/responses"
TEMPLATE = (
    "{% for t in tools or [] %}(tool){# <tool_call> #}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Bonn"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "The weather", "parameters": SCHEMA}

Check = Callable[[Any], bool]


def optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def of(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


def one_of(*values: Any) -> Check:
    return lambda value: value in values


TEXT, WHOLE, NUMBER, FLAG, LIST, OBJECT = of(str), of(int), of(int, float), of(bool), of(list), of(dict)

RESPONSE: dict[str, Check] = {
    "id": TEXT,
    "object": one_of("response"),
    "created_at": WHOLE,
    "completed_at": optional(WHOLE),
    "status": one_of("completed", "failed", "in_progress", "incomplete"),
    "incomplete_details": optional(OBJECT),
    "model": TEXT,
    "previous_response_id": optional(TEXT),
    "instructions": optional(TEXT),
    "output": LIST,
    "error": optional(OBJECT),
    "tools": LIST,
    "tool_choice": of(str, dict),
    "truncation": one_of("auto", "disabled"),
    "parallel_tool_calls": FLAG,
    "text": OBJECT,
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": WHOLE,
    "temperature": NUMBER,
    "reasoning": optional(OBJECT),
    "usage": optional(OBJECT),
    "max_output_tokens": optional(WHOLE),
    "max_tool_calls": optional(WHOLE),
    "store": FLAG,
    "background": FLAG,
    "service_tier": TEXT,
    "metadata": OBJECT,
    "safety_identifier": optional(TEXT),
    "prompt_cache_key": optional(TEXT),
}
USAGE: dict[str, Check] = {
    "input_tokens": WHOLE,
    "output_tokens": WHOLE,
    "total_tokens": WHOLE,
    "input_tokens_details": OBJECT,
    "output_tokens_details": OBJECT,
}
TOOL: dict[str, Check] = {
    "type": one_of("function"),
    "name": TEXT,
    "description": optional(TEXT),
    "parameters": optional(OBJECT),
    "strict": optional(FLAG),
}
PART: dict[str, Check] = {"type": one_of("output_text"), "text": TEXT, "annotations": LIST, "logprobs": LIST}
STATUS = one_of("in_progress", "completed", "incomplete")
ITEMS: dict[str, dict[str, Check]] = {
    "message": {"id": TEXT, "status": STATUS, "role": one_of("assistant"), "content": LIST},
    "function_call": {"id": TEXT, "call_id": TEXT, "name": TEXT, "arguments": TEXT, "status": STATUS},
}
_PLACE: dict[str, Check] = {"output_index": WHOLE, "item_id": TEXT}
_PART_PLACE: dict[str, Check] = {**_PLACE, "content_index": WHOLE}
EVENTS: dict[str, dict[str, Check]] = {
    **{f"response.{kind}": {"response": OBJECT} for kind in ("created", "in_progress", "completed")},
    "response.output_item.added": {"output_index": WHOLE, "item": OBJECT},
    "response.output_item.done": {"output_index": WHOLE, "item": OBJECT},
    "response.content_part.added": {**_PART_PLACE, "part": OBJECT},
    "response.content_part.done": {**_PART_PLACE, "part": OBJECT},
    "response.output_text.delta": {**_PART_PLACE, "delta": TEXT, "logprobs": LIST},
    "response.output_text.done": {**_PART_PLACE, "text": TEXT, "logprobs": LIST},
    "response.function_call_arguments.delta": {**_PLACE, "delta": TEXT},
    "response.function_call_arguments.done": {**_PLACE, "arguments": TEXT},
}


def check(value: Any, fields: dict[str, Check], where: str) -> None:
    """Require each of ``fields``, with a value that its check accepts."""
    for name, accepts in fields.items():
        assert name in value, f"{where} has no {name}"
        assert accepts(value[name]), f"{where}.{name} is {value[name]!r}"


def check_item(item: Any, where: str) -> None:
    check(item, ITEMS[item["type"]], f"{where} {item['type']}")
    for part in item.get("content", ()):
        check(part, PART, f"{where} part")


def check_response(response: Any, where: str = "response") -> None:
    check(response, RESPONSE, where)
    for item in response["output"]:
        check_item(item, where)
    for tool in response["tools"]:
        check(tool, TOOL, f"{where} tool")
    if response["usage"] is not None:
        check(response["usage"], USAGE, f"{where}.usage")


def user(*content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


QUESTION = {"type": "input_text", "text": "What is this?"}
PICTURE = {"type": "input_image", "image_url": data_url()}
BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": [user("Greet me.")]},
    "system message": {"input": [{"type": "message", "role": "system", "content": "Be kind."}, user("Greet me.")]},
    "tool": {"input": [user("The weather in Bonn?")], "tools": [WEATHER]},
    "required tool": {"input": [user("The weather in Bonn?")], "tools": [WEATHER], "tool_choice": "required"},
    "strict tool": {"input": [user("The weather?")], "tools": [{**WEATHER, "strict": True}]},
    "least tool": {"input": [user("The weather?")], "tools": [{"type": "function", "name": "get_weather"}]},
    "picture": {"input": [user(QUESTION, PICTURE)]},
    "turns": {"input": [user("I am Ida."), {"type": "message", "role": "assistant", "content": "Hi"}, user("I?")]},
    "all fields": {
        "input": "Hi", "temperature": 0.5, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": 0.5,
        "max_output_tokens": 50, "max_tool_calls": 3, "safety_identifier": "s", "prompt_cache_key": "k",
        "service_tier": "flex", "truncation": "auto", "parallel_tool_calls": False, "metadata": {"a": "b"},
        "store": False, "top_logprobs": 2, "reasoning": {"effort": "low"}, "instructions": "Be kind.",
    },
}  # fmt: skip


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    engine = ScriptedEngine(model=replace(SEEING_MODEL, chat_template=TEMPLATE, max_sequence_tokens=1024))
    marker = ids_of("(tool)")

    def script(spec: Any) -> list[Step]:
        text = CALL if spec.prompt[1 : 1 + len(marker)] == marker else "Hello you"
        return [*(word(text[at : at + 4], logprob=-0.5) for at in range(0, len(text), 4)), EOS_TOKEN]

    engine.script = script
    async with serving(engine) as running:
        yield running
        assert running.is_idle()


@pytest.mark.parametrize("name", BODIES)
async def test_whole_and_streamed_responses_have_all_fields(service: Service, name: str) -> None:
    body = {"model": "any", **BODIES[name]}
    kind = "function_call" if "tools" in body else "message"
    whole = await service.reply(RESPONSES, body)
    check_response(whole)
    assert whole["status"] == "completed"
    assert [item["type"] for item in whole["output"]] == [kind]
    response = await service.post(RESPONSES, body | {"stream": True})
    assert response.content_type == "text/event-stream"
    events = named_events(await response.text())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        check(event, EVENTS[event["type"]], event["type"])
        if "response" in event:
            check_response(event["response"], event["type"])
        if "item" in event:
            check_item(event["item"], event["type"])
        if "part" in event:
            check(event["part"], PART, event["type"])
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert (kinds[0], kinds[-1]) == ("created", "completed")
    deltas = "function_call_arguments" if kind == "function_call" else "output_text"
    assert {f"{deltas}.delta", f"{deltas}.done"} <= set(kinds)


async def test_a_response_tells_what_was_asked(service: Service) -> None:
    body = BODIES["all fields"]
    reply = await service.reply(RESPONSES, body)
    same = set(body) & set(RESPONSE) - {"service_tier", "reasoning"}
    assert {name: reply[name] for name in same} == {name: body[name] for name in same}
    assert reply["service_tier"] == "flex"
    reply = await service.reply(RESPONSES, {"input": "Hi"})
    defaults = {name: reply[name] for name in ("presence_penalty", "frequency_penalty", "top_logprobs")}
    assert defaults == dict.fromkeys(defaults, 0)
    unset = ("max_tool_calls", "safety_identifier", "prompt_cache_key")
    assert [reply[name] for name in unset] == [None] * 3

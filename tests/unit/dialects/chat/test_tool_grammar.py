"""The grammar for an output that must call a tool: llguidance takes it, and what it allows is what the parser reads."""

import json
from typing import Any

import pytest

from caravan_dialects.chat.tool_format import GENERIC, HERMES, LLAMA_3, MISTRAL, ToolFormat
from caravan_dialects.chat.tool_grammar import tool_constraint
from caravan_dialects.chat.tool_parser import CallPart, ToolParser
from caravan_testing.scripted_engine import ScriptedEngine
from caravan_testing.tool_families import FIRST_CONTROL, accepts

TEXT = {"type": "string"}
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/Unit"}},
    "required": ["unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["°C"]}},
}
CALL = '{"name": "f", "%s": {"unit": "°C"}}'
OUTPUTS = {
    HERMES: "<tool_call>\n%s\n</tool_call>",
    MISTRAL: "[TOOL_CALLS][%s]",
    LLAMA_3: "%s",
    GENERIC: "%s",
}
MORE = {HERMES: "<tool_call>\n%s\n</tool_call>\n<tool_call>\n%s\n</tool_call>", MISTRAL: "[TOOL_CALLS][%s, %s]"}


async def arguments_schema(parameters: dict[str, Any] | None) -> Any:
    """Return the schema that the grammar has for the arguments of a call."""
    constraint = await tool_constraint(ScriptedEngine(), GENERIC, {"f": parameters}, several=False)
    (rule,) = (line for line in constraint.source.splitlines() if line.startswith("call_0:"))
    return json.loads(rule.partition("%json ")[2])["properties"]["arguments"]


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


async def test_arguments_have_only_the_properties_that_the_schema_names() -> None:
    schema = await arguments_schema(objects(a=TEXT, b=objects(c=TEXT), d={"type": "array", "items": objects(e=TEXT)}))
    assert schema["additionalProperties"] is False
    assert schema["properties"]["b"]["additionalProperties"] is False
    assert schema["properties"]["d"]["items"]["additionalProperties"] is False
    assert schema["properties"]["a"] == TEXT


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": {}},
        {"additionalProperties": TEXT},
        {"patternProperties": {"x.*": TEXT}},
        {"minProperties": 1},
    ],
    ids=str,
)
async def test_a_schema_that_allows_other_properties_is_not_changed(more: dict[str, Any]) -> None:
    schema = objects(a=TEXT) | more
    assert await arguments_schema(schema) == schema


async def test_a_function_without_parameters_takes_no_arguments() -> None:
    assert await arguments_schema(None) == {"type": "object", "properties": {}, "additionalProperties": False}


async def test_descriptions_do_not_count_towards_the_size_of_a_grammar() -> None:
    described = {f"p{number}": TEXT | {"description": "d" * 1_000} for number in range(8)}
    functions = {f"f{number}": objects(**described) | {"title": "t" * 1_000} for number in range(20)}
    constraint = await tool_constraint(ScriptedEngine(), GENERIC, functions, several=False)
    assert len(constraint.source) < 20 * 1_000


async def test_arguments_are_an_object_where_the_schema_does_not_say() -> None:
    assert (await arguments_schema({"properties": {"a": TEXT}}))["type"] == "object"
    closed = [objects(**{name: TEXT}) | {"additionalProperties": False} for name in "ab"]
    assert await arguments_schema({"anyOf": [objects(a=TEXT), objects(b=TEXT)]}) == {"anyOf": closed}


@pytest.mark.parametrize("tool_format", list(OUTPUTS), ids=["hermes", "mistral", "llama-3", "generic"])
async def test_the_grammar_allows_what_the_parser_reads(tool_format: ToolFormat) -> None:
    functions = {"f": PARAMETERS, "clock": None}
    constraint = await tool_constraint(ScriptedEngine(), tool_format, functions, several=False)
    call = CALL % tool_format.arguments_key
    output = OUTPUTS[tool_format] % call
    assert accepts(constraint.source, output)
    parser = ToolParser(tool_format, functions)
    [part] = parser.feed(output) + parser.finish()
    assert isinstance(part, CallPart)
    assert (part.name, json.loads(part.arguments)) == ("f", {"unit": "°C"})
    clock = '{"name": "clock", "%s": {}}' % tool_format.arguments_key  # noqa: UP031 - it has braces
    assert accepts(constraint.source, OUTPUTS[tool_format] % clock)
    for wrong in (output + " ", output.replace("°C", "°F"), output.replace('"f"', '"g"'), "text", ""):
        assert not accepts(constraint.source, wrong)


@pytest.mark.parametrize("tool_format", list(OUTPUTS), ids=["hermes", "mistral", "llama-3", "generic"])
async def test_references_of_each_tool_are_to_places_in_its_own_parameters(tool_format: ToolFormat) -> None:
    trees = {name: tree_of(name) for name in ("f", "g")}
    constraint = await tool_constraint(ScriptedEngine(), tool_format, trees, several=False)
    call = '{"name": "%s", "%s": %s}'

    def allows(name: str, arguments: str) -> bool:
        written = call % (name, tool_format.arguments_key, arguments)
        return accepts(constraint.source, OUTPUTS[tool_format] % written)

    for name, other in (("f", "g"), ("g", "f")):
        leaf, wrong = (json.dumps({"v": value, "same": value, "kids": []}) for value in (name, other))
        assert allows(name, leaf)
        assert allows(name, leaf.replace("[]", f"[{leaf}]"))
        assert not allows(name, wrong)
        assert not allows(name, leaf.replace("[]", f"[{wrong}]"))
        assert not allows(name, leaf.replace("[]", f"[{call % (name, tool_format.arguments_key, leaf)}]"))


def tree_of(value: str) -> dict[str, Any]:
    kids = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    properties = {"v": {"$ref": "#/$defs/v"}, "same": {"$ref": "#/properties/v"}, "kids": kids}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        "$defs": {"v": {"enum": [value]}},
    }


@pytest.mark.parametrize("tool_format", list(MORE), ids=["hermes", "mistral"])
async def test_several_calls_are_allowed_only_on_request(tool_format: ToolFormat) -> None:
    output = MORE[tool_format] % ((CALL % tool_format.arguments_key,) * 2)
    one = await tool_constraint(ScriptedEngine(), tool_format, {"f": PARAMETERS}, several=False)
    several = await tool_constraint(ScriptedEngine(), tool_format, {"f": PARAMETERS}, several=True)
    assert not accepts(one.source, output)
    assert accepts(several.source, output)


async def test_a_marker_that_is_a_control_token_is_matched_by_its_token_id() -> None:
    engine = ScriptedEngine(controls={"[TOOL_CALLS]": 255})
    constraint = await tool_constraint(engine, MISTRAL, {"f": None}, several=False)
    assert constraint.source.startswith('start: <[255]> "[" call "]"\n')


async def test_where_control_tokens_open_calls_a_text_may_have_their_letters() -> None:
    controls = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|other|>")
    engine = ScriptedEngine(controls={control: FIRST_CONTROL + at for at, control in enumerate(controls)})
    thoughts = {"<think>", "</think>"}
    constraint = await tool_constraint(engine, HERMES, {"f": PARAMETERS}, several=True, beside=thoughts)
    calls = MORE[HERMES] % ((CALL % "arguments",) * 2)
    for text in ("", "Well.\n", "<think>So: {</think>", "a<think></think>\nb", '<tool_call"> [TOOL_CALLS]'):
        assert accepts(constraint.source, text, controls)
        assert accepts(constraint.source, f"{text}{calls}", controls)
        for wrong in (calls.replace("°C", "°F"), f"{calls}x", "<tool_call>", "<|other|>", f"{calls}{calls}"):
            assert not accepts(constraint.source, f"{text}{wrong}", controls)

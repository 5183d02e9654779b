"""The grammar for an output that must call a tool: the schema of the arguments."""

import json
from typing import Any

import pytest

from caravan_dialects.chat.known_tool_formats import GENERIC
from caravan_dialects.chat.tool_grammar import tool_constraint
from caravan_testing.scripted_engine import ScriptedEngine

TEXT = {"type": "string"}


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

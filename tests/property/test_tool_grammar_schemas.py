"""In families whose arguments are no JSON, what a constraint allows matches the schema, or the schema is refused."""

import contextlib
import json
from random import Random
from typing import Any

import jsonschema
import pytest

from caravan_dialects.chat.schema_references import UnsupportedToolError
from caravan_dialects.chat.tool_derivation import ToolFormats
from caravan_dialects.chat.tool_format import Style, ToolFormat
from caravan_dialects.chat.tool_grammar import tool_constraint
from caravan_dialects.chat.tool_parser import ToolParser
from caravan_testing.random_schemas import random_schema
from caravan_testing.scripted_engine import ScriptedEngine
from caravan_testing.tool_families import FAMILIES, FIRST_CONTROL, Family, accepts, drawn, joined, render_here

Schema = dict[str, Any]

NOT_JSON = (Style.TAGS, Style.PYTHON, Style.BRACES)


FORMATS = ToolFormats(render_here)


def of(schema: Any, *, required: bool = True, **more: Any) -> Schema:
    return {**closed(v=schema), "required": ["v"] if required else [], **more}


def closed(**properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


WORDS = {"enum": ["aa", "bb"]}
NULL = {"type": "null"}
ENUM: dict[str, Any] = {"$defs": {"E": WORDS}}
TREE = closed(v={"enum": ["q1"]}, kids={"type": "array", "items": {"$ref": "#/$defs/T"}, "maxItems": 1})
# Schemas, each with a value that must be possible.
CASES: dict[str, tuple[Schema, Any]] = {
    "root reference": ({"$ref": "#/$defs/S", "$defs": {"S": closed(k=WORDS)}}, {"k": "bb"}),
    "root allOf": ({"allOf": [closed(k=WORDS), {"required": ["k"]}]}, {"k": "aa"}),
    "root anyOf": ({"anyOf": [closed(k=WORDS), closed(n={"type": "integer", "minimum": 5})]}, {"n": 7}),
    "root oneOf": ({"oneOf": [closed(t={"const": "a"}, x=WORDS), closed(t={"const": "b"})]}, {"t": "b"}),
    "root anyOf of required": (
        {"type": "object", "properties": {"a": WORDS, "b": WORDS}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"b": "aa"},
    ),
    "same name, other type": (
        {"anyOf": [closed(k={"type": "string", "maxLength": 9}), closed(k={"type": "integer", "minimum": 5})]},
        {"k": "x"},
    ),
    "recursive": ({"$ref": "#/$defs/T", "$defs": {"T": TREE}}, {"v": "q1", "kids": [{"v": "q1", "kids": []}]}),
    "recursive root": (
        closed(v={"enum": ["q1"]}, kids={"type": "array", "items": {"$ref": "#"}, "maxItems": 1}),
        {"v": "q1", "kids": []},
    ),
    "reference to a property": ({**closed(a=WORDS, b={"$ref": "#/properties/a"})}, {"a": "aa", "b": "bb"}),
    "optional literal": (of({"anyOf": [{"type": "string", **WORDS}, NULL]}), {"v": None}),
    "nullable enum": (of({"type": ["string", "null"], "enum": ["aa", None]}), {"v": None}),
    "optional enum by reference": (of({"anyOf": [{"$ref": "#/$defs/E"}, NULL]}, **ENUM), {"v": "aa"}),
    "oneOf of consts": (of({"oneOf": [{"const": "aa"}, {"const": "bb"}]}), {"v": "bb"}),
    "allOf of one reference": (of({"allOf": [{"$ref": "#/$defs/E"}]}, **ENUM), {"v": "aa"}),
    "text or integer": (of({"type": ["string", "integer"], "maxLength": 9, "maximum": 99}), {"v": 12}),
    "short text or large integer": (
        of({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 1000, "maximum": 3000}]}),
        {"v": 1234},
    ),
    "literal or integer": (
        of({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": 9}]}),
        {"v": "auto"},
    ),
    "text or list": (
        of(
            {
                "anyOf": [
                    {"type": "string", "maxLength": 9},
                    {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                ]
            }
        ),
        {"v": [1]},
    ),
    "optional short text": (of({"anyOf": [{"type": "string", "minLength": 1, "maxLength": 5}, NULL]}), {"v": None}),
    "optional pattern": (of({"anyOf": [{"type": "string", "pattern": "^[ntu][a-z]{3}$"}, NULL]}), {"v": "true"}),
    "texts that look like others": (of({"enum": ["12", "true", "null", "[]", " a ", ""]}), {"v": "12"}),
    "mixed enum": (of({"enum": ["aa", 1, None, True, [1], {"k": "v"}, 2.5]}), {"v": {"k": "v"}}),
    "pattern and length": (of({"type": "string", "pattern": "^a*$", "minLength": 2, "maxLength": 4}), {"v": "aaa"}),
    "date": (of({"type": "string", "format": "date"}), {"v": "2024-02-03"}),
    "two items": (of({"type": "array", "items": WORDS, "minItems": 2, "maxItems": 2}), {"v": ["aa", "bb"]}),
    "no items": (of({"type": "array", "items": WORDS, "maxItems": 0}), {"v": []}),
    "tuple": (
        of({"type": "array", "prefixItems": [{"enum": ["aa"]}, {"enum": [1]}], "items": False, "minItems": 2}),
        {"v": ["aa", 1]},
    ),
    "short tuple": (
        of({"type": "array", "prefixItems": [WORDS, WORDS], "items": {"const": 3}, "minItems": 1, "maxItems": 4}),
        {"v": ["aa"]},
    ),
    "list of an empty text": (of({"type": "array", "items": {"const": ""}, "minItems": 1, "maxItems": 1}), {"v": [""]}),
    "map of texts": (of({"type": "object", "additionalProperties": WORDS}), {"v": {"k": "aa"}}),
    "map of texts at the root": ({"type": "object", "additionalProperties": {"type": "string", "maxLength": 4}}, {}),
    "any list": (
        of({"type": "array", "items": {"type": ["integer", "array"], "maximum": 9}, "maxItems": 2}),
        {"v": [1]},
    ),
    "object": (of(closed(a=WORDS, b={"type": ["integer", "null"]})), {"v": {"a": "bb", "b": None}}),
    "optional object": (of({"anyOf": [closed(a=WORDS), NULL]}), {"v": {"a": "aa"}}),
    "union of objects": (
        of({"anyOf": [closed(a=WORDS), closed(b={"type": "array", "items": WORDS})]}),
        {"v": {"b": ["aa"]}},
    ),
    "untyped with bounds": (of({"minimum": 5, "maxLength": 3}), {"v": "abc"}),
    "missing property": (
        {"type": "object", "properties": {"a": WORDS}, "required": ["a", "b"], "additionalProperties": WORDS},
        {"a": "aa", "b": "bb"},
    ),
    "pattern properties": (
        of({"type": "object", "patternProperties": {"^[a-c]{1,3}$": WORDS}, "additionalProperties": False}),
        {"v": {"ab": "aa"}},
    ),
    "at least one": ({**of(WORDS, required=False), "minProperties": 1}, {"v": "aa"}),
    "number bounds": (of({"allOf": [{"type": "number", "minimum": 2}, {"type": "integer", "maximum": 4}]}), {"v": 3}),
}


# Of each syntax, one that `make test` tries.
USUAL_FAMILIES = ("Qwen3-Coder", "Kimi K3", "MiniMax M3", "Gemma 4", "LFM 2")
# Written as tags within tags where that is possible, else as JSON.
NESTED = "MiniMax M3"
SEEDS = 1


def families() -> list[Any]:
    return [
        pytest.param(family, id=family.name, marks=[] if family.name in USUAL_FAMILIES else [pytest.mark.slow])
        for family in FAMILIES
    ]


async def format_of(family: Family) -> ToolFormat | None:
    """Return the format of a family whose arguments are no JSON."""
    tool_format = await FORMATS.of(family.template)
    return tool_format if tool_format.style in NOT_JSON else None


def check(tool_format: ToolFormat, grammar: str, schema: Schema, seed: int) -> None:
    output = drawn(grammar, Random(seed), most=400)
    parser = ToolParser(tool_format, {"f": schema})
    text, calls = joined([*parser.feed(output), *parser.finish()])
    assert (text, [called for called, _ in calls]) == ("", ["f"]), output
    try:
        jsonschema.validate(json.loads(calls[0][1]), schema)
    except (jsonschema.ValidationError, ValueError) as error:
        raise AssertionError(output, calls) from error


@pytest.mark.parametrize("family", families())
async def test_whatever_is_drawn_matches_and_right_calls_are_possible(family: Family) -> None:
    tool_format = await format_of(family)
    if tool_format is None:
        return
    for case, (schema, value) in CASES.items():
        if family.name == NESTED and case == "map of texts at the root":
            continue
        constraint = await tool_constraint(ScriptedEngine(), tool_format, {"f": schema}, several=False)
        if family.name != NESTED and family.enforced:
            assert accepts(constraint.source, family.written([("f", value)]).strip()), (case, value)
        for seed in range(SEEDS):
            check(tool_format, constraint.source, schema, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
async def test_whatever_is_drawn_from_random_schemas_matches(family: Family) -> None:
    tool_format = await format_of(family)
    for seed in range(60 if tool_format else 0):
        assert tool_format is not None
        schema = random_schema(seed)
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        functions = {"f": of(schema, **definitions)}
        # The syntax cannot carry some names.
        with contextlib.suppress(UnsupportedToolError):
            constraint = await tool_constraint(ScriptedEngine(), tool_format, functions, several=False)
            check(tool_format, constraint.source, functions["f"], seed)


REFUSED: dict[str, tuple[Schema, str]] = {
    "maxProperties": ({**closed(a=WORDS), "required": [], "maxProperties": 0}, "maxProperties"),
    "not": (of({"type": "string", "not": {"const": "a"}}), "`properties.v.not`"),
    "dependentRequired": ({**closed(a=WORDS), "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "overlapping oneOf": ({"oneOf": [closed(a=WORDS), {"type": "object", "properties": {"a": WORDS}}]}, "oneOf"),
    "nothing": (of({"allOf": [{"type": "string"}, {"type": "integer"}]}), "no value matches"),
    "no object": ({"allOf": [{"type": "array"}]}, "no object"),
    "endless reference": ({"$ref": "#"}, "refers to itself"),
    "missing reference": (of({"$ref": "#/$defs/none"}), "does not exist"),
    "too many": (
        {"allOf": [{"anyOf": [closed(**{f"k{at}{n}": WORDS}) for n in range(9)]} for at in range(3)]},
        "alternatives",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_enforced_is_refused_by_name(case: str) -> None:
    schema, problem = REFUSED[case]
    for family in FAMILIES:
        if family.name in USUAL_FAMILIES and (tool_format := await format_of(family)):
            with pytest.raises(UnsupportedToolError, match=problem):
                await tool_constraint(ScriptedEngine(), tool_format, {"f": schema}, several=False)


# By family: the text that closes a value there, and names that its syntax cannot carry.
SPECIAL = {
    "Qwen3-Coder": ("</parameter>", ["x>y", "<x>", " a"]),
    "GLM 4.5": ("</arg_value>", ["x</arg_key>"]),
    "MiniMax M2": ("</parameter>", ['x">y']),
    "MiniMax M3": ("]<]minimax[>[</v>", ["x>y"]),
    "Gemma 4": ('<|"|>', ["a b", "a,b", "x=y:z", 'a"b']),
    "LFM 2": ("", ["a b", "a,b", "x=y", 'a"b']),
    "Olmo 3": ("", ["a b"]),
    "DeepSeek V3.2": ("</\uff5cDSML\uff5cparameter>", ['a"b']),
    "Kimi K3": ("<|close|>argument", ['a"b']),
}


@pytest.mark.parametrize("name", SPECIAL)
async def test_what_the_syntax_cannot_carry_is_refused_by_name(name: str) -> None:
    [family] = [family for family in FAMILIES if family.name == name]
    tool_format = await format_of(family)
    assert tool_format is not None
    closing, names = SPECIAL[name]
    odd = [f"a{closing}", f"{closing}"] if closing else []
    schemas = [of({"enum": ["aa", text]}) for text in odd]
    # A list is JSON there, or has the same quotes.
    schemas += [of({"type": "array", "items": {"enum": [text]}, "minItems": 1}) for text in odd]
    schemas += [closed(**{key: WORDS}) for key in names]
    for schema in schemas:
        with pytest.raises(UnsupportedToolError):
            await tool_constraint(ScriptedEngine(), tool_format, {"f": schema}, several=False)
    for text in (" a ", '"', "\\", "\n", "</b>", "it's {y}, [z]"):
        await tool_constraint(ScriptedEngine(), tool_format, {"f": of({"enum": [text]})}, several=False)


async def test_behind_a_control_token_a_value_may_have_its_text() -> None:
    [family] = [family for family in FAMILIES if family.name == "Gemma 4"]
    tool_format = await format_of(family)
    assert tool_format is not None
    controls = ('<|"|>', "<|tool_call>", "<tool_call|>")
    engine = ScriptedEngine(controls={control: FIRST_CONTROL + at for at, control in enumerate(controls)})
    schema = of({"type": "array", "items": WORDS, "minItems": 1})
    constraint = await tool_constraint(engine, tool_format, {"f": schema}, several=False)
    assert accepts(constraint.source, family.written([("f", {"v": ["aa", "bb"]})]), controls)
    await tool_constraint(engine, tool_format, {"f": of({"enum": ['<|"|>']})}, several=False)

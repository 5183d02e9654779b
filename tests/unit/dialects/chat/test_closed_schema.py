"""Objects of schemas are closed where a grammar is made of them, over the names of all that applies to them."""

import json
from typing import Any

import jsonschema
import pytest

from caravan_dialects.chat.closed_schema import closed_schema, json_layout
from caravan_dialects.chat.grammar_terms import json_term
from caravan_testing.tool_families import accepts, compiles

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}


def objects(*required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return schema | {"required": [*required]} if required else schema


BASE = {"Base": objects("a", a=TEXT)}
TO_BASE = {"$ref": "#/$defs/Base"}
TREE = {"Tree": objects(kids={"type": "array", "items": {"$ref": "#/$defs/Tree"}})}

CLOSED: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    # The schema, values that a model may write, and values that match the schema and may not be written.
    "at the root": (objects(a=TEXT), [{}, {"a": "x"}], [{"b": 1}, {"a": "x", "b": 1}]),
    "no properties": (objects(), [{}], [{"b": 1}]),
    "without a type": ({"properties": {"a": TEXT}}, [{"a": "x"}, 1], [{"a": "x", "b": 1}]),
    "a type of several": (objects(a=TEXT) | {"type": ["object", "null"]}, [{"a": "x"}, None], [{"b": 1}]),
    "in a property": (objects(o=objects(a=TEXT)), [{"o": {"a": "x"}}], [{"o": {"b": 1}}]),
    "in a list": ({"type": "array", "items": objects(a=TEXT)}, [[{"a": "x"}]], [[{"b": 1}]]),
    "in a tuple": ({"type": "array", "prefixItems": [objects(a=TEXT)], "items": False}, [[{}]], [[{"b": 1}]]),
    "in a map": ({"type": "object", "additionalProperties": objects(a=TEXT)}, [{"k": {}}], [{"k": {"b": 1}}]),
    "by a pattern": (
        {"type": "object", "patternProperties": {"^k.$": objects(a=TEXT)}, "additionalProperties": False},
        [{"k1": {"a": "x"}}],
        [{"k1": {"b": 1}}],
    ),
    "in a definition": (objects(o=TO_BASE) | {"$defs": BASE}, [{"o": {"a": "x"}}], [{"o": {"a": "x", "b": 1}}]),
    "at the root, by reference": (TO_BASE | {"$defs": BASE}, [{"a": "x"}], [{"a": "x", "b": 1}]),
    "a tree": ({"$ref": "#/$defs/Tree", "$defs": TREE}, [{"kids": [{"kids": []}]}], [{"kids": [{"b": 1}]}]),
    "options": (
        {"anyOf": [objects("a", a=TEXT), objects("b", b=TEXT), {"type": "null"}]},
        [{"a": "x"}, {"b": "x"}, None],
        [{"a": "x", "b": "x"}, {"a": "x", "c": 1}],
    ),
    "an option by reference": ({"anyOf": [TO_BASE, INTEGER], "$defs": BASE}, [{"a": "x"}, 1], [{"a": "x", "b": 1}]),
    "options told apart by a constant": (
        {"oneOf": [objects("k", k={"const": "a"}, a=TEXT), objects("k", k={"const": "b"}, b=TEXT)]},
        [{"k": "a", "a": "x"}, {"k": "b", "b": "x"}],
        [{"k": "a", "b": "x"}, {"k": "b", "a": 1}],
    ),
    "members of allOf": (
        {"allOf": [objects("a", a=TEXT), objects("b", b=TEXT)]},
        [{"a": "x", "b": "x"}],
        [{"a": "x", "b": "x", "c": 1}],
    ),
    "one member": ({"allOf": [TO_BASE], "$defs": BASE}, [{"a": "x"}], [{"a": "x", "b": 1}]),
    "a derived model": (
        {"allOf": [TO_BASE, objects("b", b=TEXT)], "$defs": BASE},
        [{"a": "x", "b": "x"}],
        [{"a": "x", "b": "x", "c": 1}],
    ),
    "a derived model beside its base": (
        objects(d=TO_BASE | objects("b", b=TEXT), base=TO_BASE) | {"$defs": BASE},
        [{"d": {"b": "x", "a": "x"}, "base": {"a": "x"}}],
        [{"base": {"a": "x", "b": "x"}}],
    ),
    "a model twice derived": (
        {
            "allOf": [{"$ref": "#/$defs/Derived"}, objects("c", c=TEXT)],
            "$defs": BASE | {"Derived": {"allOf": [TO_BASE, objects("b", b=objects(in_=TEXT))]}},
        },
        [{"a": "x", "b": {}, "c": "x"}],
        [{"a": "x", "b": {}, "c": "x", "d": 1}, {"a": "x", "b": {"other": 1}, "c": "x"}],
    ),
    "options beside properties": (
        objects("k", k=TEXT) | {"anyOf": [objects("a", a=TEXT), objects("b", b=TEXT)]},
        [{"k": "x", "a": "x"}, {"k": "x", "b": "x"}],
        [{"k": "x", "a": "x", "b": "x"}, {"k": "x", "a": "x", "c": 1}],
    ),
    "options that require": (
        objects(a=TEXT, b=TEXT) | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": "x"}, {"a": "x", "b": "x"}],
        [{"a": "x", "c": 1}],
    ),
    "properties that options share": (
        {"type": "object", "required": ["k"], "anyOf": [objects("a", a=TEXT), TO_BASE], "$defs": BASE},
        [{"a": "x", "k": 1}],
        [{"a": "x", "k": 1, "c": 1}],
    ),
    "options in a member": (
        {"allOf": [objects("k", k=TEXT), {"anyOf": [objects("a", a=TEXT), objects("b", b=TEXT)]}]},
        [{"k": "x", "a": "x"}, {"k": "x", "b": "x"}],
        [{"k": "x", "a": "x", "c": 1}],
    ),
    "a required name without a schema": (
        objects("a", "b", a=TEXT),
        [{"a": "x", "b": 1}, {"a": "x", "b": [{}]}],
        [{"a": "x", "b": 1, "c": 1}],
    ),
    "a required name in a member": (
        {"allOf": [objects(a=TEXT), {"required": ["b"]}]},
        [{"a": "x", "b": 1}],
        [{"a": "x", "b": 1, "c": 1}],
    ),
}


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED.values(), ids=[*CLOSED])
def test_objects_have_only_the_properties_that_are_named(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for value in good:
        assert validator.is_valid(value), value
        assert writes(schema, value), value
    for value in bad:
        assert validator.is_valid(value), value
        assert not writes(schema, value), value


OPEN: dict[str, tuple[dict[str, Any], Any]] = {
    "any object": ({"type": "object"}, {"b": 1}),
    "other properties": (objects(a=TEXT) | {"additionalProperties": True}, {"a": "x", "b": [1]}),
    "other properties by another word": (objects(a=TEXT) | {"unevaluatedProperties": True}, {"b": 1}),
    "other properties of a type": (objects(a=TEXT) | {"additionalProperties": INTEGER}, {"a": "x", "b": 1}),
    "by a pattern": (objects(a=TEXT) | {"patternProperties": {"^x.*$": TEXT}}, {"a": "x", "xy": "x", "b": 1}),
    "a member": ({"allOf": [objects(a=TEXT), {"additionalProperties": True}]}, {"a": "x", "b": 1}),
    "a base": (
        {"allOf": [TO_BASE, objects(b=TEXT)], "$defs": {"Base": objects(a=TEXT) | {"additionalProperties": {}}}},
        {"a": "x", "b": "x", "c": 1},
    ),
    "an option": (
        {"anyOf": [objects("a", a=TEXT), objects("b", b=TEXT) | {"additionalProperties": True}]},
        {"b": "x", "c": 1},
    ),
    "more than are named": (objects("a", a=TEXT) | {"minProperties": 2}, {"a": "x", "b": 1}),
    "parts that may not exclude each other": (
        {"oneOf": [objects("a", a=TEXT), objects("b", b=TEXT) | {"additionalProperties": False}]},
        {"a": "x", "c": 1},
    ),
    "a constant": (objects(a=TEXT) | {"const": {"b": 1}}, {"b": 1}),
}


@pytest.mark.parametrize(("schema", "value"), OPEN.values(), ids=[*OPEN])
def test_objects_stay_open_where_the_schema_says_so(schema: dict[str, Any], value: Any) -> None:
    assert jsonschema.Draft202012Validator(schema).is_valid(value)
    assert writes(schema, value)


def test_a_member_that_is_closed_keeps_its_meaning() -> None:
    schema = {"allOf": [objects(a=TEXT) | {"additionalProperties": False}, objects(b=TEXT)]}
    assert writes(schema, {"a": "x"})
    assert not writes(schema, {"b": "x"})


def test_a_definition_has_two_forms_only_if_it_is_also_used_beside_other_schemas() -> None:
    closed = closed_schema({"allOf": [TO_BASE, objects(b=TEXT)], "$defs": BASE})
    assert [*closed["$defs"]] == ["Base_open"]
    assert [*closed_schema(objects(o=TO_BASE) | {"$defs": BASE})["$defs"]] == ["Base"]


@pytest.mark.parametrize("name", ["many options", "many bases"])
def test_a_schema_that_would_become_too_large_stays_open(name: str) -> None:
    many: dict[str, Any] = {f"p{number}": {} for number in range(8_000)}
    closed = closed_schema({
        "many options": {"type": "object", "properties": many, "anyOf": [{"required": ["a"]}] * 8_000},
        "many bases": objects(**{f"o{at}": TO_BASE | objects(b=TEXT) for at in range(2_000)})
        | {"$defs": {"Base": objects(**many)}},
    }[name])  # fmt: skip
    assert len(json.dumps(closed)) < 4_000_000


def writes(schema: dict[str, Any], value: Any) -> bool:
    grammar = f"start: {json_term({**closed_schema(schema), 'x-guidance': json_layout(compact=True)})}"
    assert compiles(grammar)
    return accepts(grammar, json.dumps(value, separators=(",", ":")))

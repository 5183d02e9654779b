"""The form of schemas that grammars are made of: references, what is left out, what is refused."""

import json
import re
from contextlib import suppress
from random import Random
from typing import Any

import jsonschema
import pytest

from caravan_dialects.chat.plain_schema import plain_schema
from caravan_dialects.chat.schema_references import UnsupportedSchemaError
from caravan_dialects.chat.schema_values import ends_in_escape, pattern_problem

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
BIG = 2**53 + 1
ENDLESS_MAP = {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}
IDLE: list[dict[str, Any]] = [
    {"title": "t", "description": "d", "default": {"type": "null"}, "examples": [1], "deprecated": True},
    {"$schema": "http://example.com/unknown", "$id": "http://h/x", "$comment": "c", "$anchor": "a"},
    {"readOnly": True, "writeOnly": False, "nullable": False, "discriminator": {}, "x-order": 1, "x-guidance": {}},
    {"contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": {"not": {}}},
    {"minLength": 0, "minItems": 0, "minProperties": 0, "uniqueItems": False, "required": [], "pattern": ""},
    {"maxLength": 2**53 - 1, "maxItems": 2**31, "maxProperties": 2**32},
    {"propertyNames": True, "unevaluatedItems": {}, "additionalItems": INTEGER},
    {"propertyNames": {"type": "string", "description": "d"}},
    {"propertyNames": {}, "if": {"const": 1}, "minContains": 2, "dependentRequired": {}, "dependentSchemas": {}},
    {"if": {"const": 1}, "then": {"title": "t"}, "else": True},
    {"then": INTEGER, "else": TEXT, "not": False, "contains": INTEGER, "minContains": 0},
    *({"format": name} for name in ("password", "binary", "path", "regex", "iri", "idn-email", "int32", "byte", "x")),
]
# fmt: off
_WORDS = (
    "type", "enum", "const", "required", "items", "prefixItems", "additionalItems", "additionalProperties",
    "properties", "patternProperties", "propertyNames", "minItems", "maxItems", "minLength", "maxLength", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf", "not", "if", "then",
    "else", "contains", "minContains", "uniqueItems", "dependentRequired", "dependentSchemas", "unevaluatedItems",
    "unevaluatedProperties", "$ref", "$defs", "$id", "$anchor", "$dynamicRef", "$recursiveRef", "format", "pattern",
    "minProperties",
)
# fmt: on
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**30, "x", "integer", ["integer", "null"], [], {}, ["a"], [{}], [TEXT], [[]]),
    *({"a": {}}, {"a": 1}, {"a": ["b"]}, {"type": "object"}, {"$ref": "#"}),
)
ESCAPE = "the regular expression ends with a backslash that escapes nothing"


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def matches(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


REFERENCES: list[tuple[dict[str, Any], Any, Any]] = [
    # The schema, a value that matches it, and one that does not.
    (objects(kids={"type": "array", "items": {"$ref": "#"}}), {"kids": [{"kids": []}]}, {"kids": [{"kids": 1}]}),
    (objects(a=INTEGER, b={"$ref": "#/properties/a"}), {"b": 1}, {"b": "x"}),
    (objects(a={"items": INTEGER}, b={"$ref": "#/properties/a/items"}), {"b": 1}, {"b": "x"}),
    (objects(o={"$defs": {"E": {"enum": [1]}}}, b={"$ref": "#/properties/o/$defs/E"}), {"b": 1}, {"b": 2}),
    (objects(b={"$ref": "#/$defs/a~1b~0%25%20c"}) | {"$defs": {"a/b~% c": INTEGER}}, {"b": 1}, {"b": "x"}),
    (objects(b={"$ref": "#int"}) | {"$defs": {"x": {"$anchor": "int", **INTEGER}}}, {"b": 1}, {"b": "x"}),
    (objects(b={"$ref": "int.json"}) | {"$defs": {"x": {"$id": "int.json", **INTEGER}}}, {"b": 1}, {"b": "x"}),
    (
        {"$id": "http://h/root.json", **objects(b={"$ref": "root.json#/$defs/x"}), "$defs": {"x": INTEGER}},
        {"b": 1},
        {"b": "x"},
    ),
    (
        objects(b={"$ref": "part"}) | {"$defs": {"p": {"$id": "part", "$ref": "#/$defs/n", "$defs": {"n": INTEGER}}}},
        {"b": 1},
        {"b": "x"},
    ),
    ({"$ref": "#/$defs/S", "$defs": {"S": objects(s={"$ref": "#/$defs/S"})}}, {"s": {"s": {}}}, {"s": {"s": 1}}),
    ({"allOf": [{"$ref": "#/definitions/S"}], "definitions": {"S": objects(s=INTEGER)}}, {"s": 1}, {"s": "x"}),
    ({"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]}, [1], ["x"]),
    ({"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#"}}]}, [[1]], [["x"]]),
    ({"$ref": "#/$defs/yes", "$defs": {"yes": True}}, 1, ...),
    (objects(b={"$ref": "#/x-types/T"}) | {"x-types": {"T": INTEGER}}, {"b": 1}, {"b": "x"}),
    (
        objects(b={"$dynamicRef": "#n"}) | {"$defs": {"x": {"$dynamicAnchor": "n", **INTEGER}}},
        {"b": 1},
        {"b": "x"},
    ),
]


@pytest.mark.parametrize(("schema", "good", "bad"), REFERENCES, ids=str)
def test_references_are_to_definitions_at_the_root(schema: dict[str, Any], good: Any, bad: Any) -> None:
    plain = plain_schema(schema)
    assert all(text.startswith("#/$defs/") for text in references_of(plain))
    # It means the same within another schema that has its definitions.
    definitions = plain.pop("$defs", {})
    within = objects(arguments=plain) | {"$defs": definitions}
    assert matches(within, {"arguments": good})
    assert bad is ... or not matches(within, {"arguments": bad})


def references_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [text for inner in value.values() for text in references_of(inner)]
    return [text for inner in value for text in references_of(inner)] if isinstance(value, list) else []


def test_a_nested_id_that_generators_write_does_not_hide_the_definitions_of_the_whole() -> None:
    schema = objects(a={"$id": "/properties/a", "$ref": "#/$defs/x"}) | {"$defs": {"x": INTEGER}}
    assert plain_schema(schema) == objects(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": INTEGER}}


@pytest.mark.parametrize("idle", IDLE, ids=str)
def test_what_constrains_nothing_is_left_out(idle: dict[str, Any]) -> None:
    assert plain_schema({"type": ["string", "object"], **idle}) == {"type": ["string", "object"]}
    inside = {"anyOf": [objects(a=TEXT | idle), {"type": "array", "items": TEXT | idle}]}
    assert plain_schema(inside) == {"anyOf": [objects(a=TEXT), {"type": "array", "items": TEXT}]}


def test_properties_and_values_may_be_named_like_annotations() -> None:
    values = {"enum": [{"description": "d", "title": 1}], "const": {"$comment": "c", "default": None}}
    schema = objects(description=TEXT, title=values, default={"$ref": "#/properties/description"})
    plain = plain_schema(schema | {"description": "d", "required": ["description", "title"]})
    assert plain["properties"] == {
        "description": TEXT,
        "title": values,
        "default": {"$ref": "#/$defs/description"},
    }
    assert plain["required"] == ["description", "title"]


REFUSED = [
    ({"enum": [1, {"id": [BIG]}]}, "`enum[1].id[0]`: a number must be between -2**53 and 2**53"),
    (objects(a={"const": -BIG}), "`properties.a.const`: a number must be between -2**53 and 2**53"),
    (objects(a={"const": 1e300}), "Given: 1e+300"),
    ({"minimum": BIG, "maximum": BIG}, "no number that can be enforced is between its bounds"),
    ({"exclusiveMinimum": 2**63}, "`exclusiveMinimum`: a bound must be between -2**63 and 2**63"),
    ({"maximum": -1e300}, "`maximum`: a bound must be between -2**63 and 2**63. Given: -1e+300"),
    ({"minimum": "3"}, "`minimum`: it must be a number. Given: 3"),
    ({"multipleOf": BIG}, "`multipleOf`: its digits must be less than 2**32"),
    ({"multipleOf": 0.123456789012}, "`multipleOf`: its digits must be less than 2**32. Given: 0.123456789012"),
    ({"multipleOf": 0}, "`multipleOf`: it must be a number above 0. Given: 0"),
    (objects(a={"pattern": "^a\\"}), "`properties.a.pattern`: the regular expression ends with a backslash"),
    ({"patternProperties": {"x\\\\\\": {}}}, "`patternProperties`: the regular expression ends with a backslash"),
    ({"pattern": "a**"}, "`pattern`: the regular expression has nothing to repeat at 2"),
    ({"patternProperties": {"^+": {}}}, "`patternProperties`: the regular expression has nothing to repeat at 1"),
    ({"not": {}}, "`not`: it cannot be enforced"),
    ({"if": {}, "then": INTEGER}, "`if`: it cannot be enforced"),
    ({"contains": {}}, "`contains`: it cannot be enforced"),
    ({"items": {"uniqueItems": True}}, "`items.uniqueItems`: it cannot be enforced"),
    ({"dependentRequired": {"a": ["b"]}}, "`dependentRequired`: it cannot be enforced"),
    ({"propertyNames": {"pattern": "^x", "maxLength": 3}}, "`propertyNames`: it cannot be enforced"),
    (objects(a={}) | {"propertyNames": {"maxLength": 3}}, "`propertyNames`: it cannot be enforced"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "`unevaluatedProperties`: it cannot be enforced beside"),
    ({"$ref": "#/$defs/a"}, "`$ref`: `#/$defs/a` does not exist within the schema"),
    ({"$ref": "http://h/x"}, "nothing is fetched"),
    ({"$ref": "#/required", "required": ["a"]}, "`$ref`: `#/required` does not exist"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [TEXT, {"not": {}}]}}}, "`$defs.a.anyOf[1].not`: it cannot"),
    ({"$ref": "#"}, "it refers to itself without an end"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}}, "without an end"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "without an end"),
    ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS_MAP}}, "it refers to itself without an end"),
    ({"$ref": "#/$defs/a", "$defs": {"a": ENDLESS_MAP | {"required": ["x"]}}}, "it refers to itself without an end"),
    ({"$ref": 1}, "`$ref`: it must be a string"),
    ({"type": "text"}, "`type`: it must be one of array, boolean"),
    ({"type": None}, "`type`: it must be one of"),
    ({"enum": "a"}, "`enum`: it must be a list"),
    ({"anyOf": []}, "`anyOf`: it must be a list of schemas, not an empty one"),
    ({"properties": {"a": 1}}, "`properties.a`: it must be a schema"),
    ({"properties": []}, "`properties`: it must be an object of schemas"),
    ({"required": True}, "`required`: it must be a list of names"),
    ({"minLength": -1}, "`minLength`: it must be a whole number >= 0. Given: -1"),
    ({"maxItems": 1.5}, "`maxItems`: it must be a whole number >= 0. Given: 1.5"),
    ({"pattern": 1}, "`pattern`: it must be a regular expression"),
    ({"format": 1}, "`format`: it must be a string"),
    (json.loads('{"items":' * 400 + "{}" + "}" * 400), "it is nested too deeply"),
    ({"prefixItems": [{}] * 17_000}, "it must have at most 16384 schemas within it"),
    (
        {"patternProperties": {"^[ab]$": {}}, "additionalProperties": False, "minProperties": 3},
        "`minProperties`: there are only 2 properties",
    ),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        plain_schema(schema)
    assert words in str(caught.value)


REWRITTEN = [
    # Bounds between doubles move inwards, so that what keeps to them is right.
    ({"minimum": BIG, "maximum": 2**63 - 1}, {"minimum": BIG + 1, "maximum": 2**63 - 1024}),
    ({"minimum": -(2**63), "maximum": 2**64 - 1}, {"minimum": 1024 - 2**63, "maximum": 2**63 - 1024}),
    ({"exclusiveMinimum": 2**53, "exclusiveMaximum": 2**54}, {"minimum": 2**53 + 2, "maximum": 2**54 - 2}),
    ({"minimum": -1e300, "maximum": 1e300}, {"minimum": 1024 - 2**63, "maximum": 2**63 - 1024}),
    ({"minimum": 0, "maximum": 2**53 - 1}, {"minimum": 0, "maximum": 2**53 - 1}),
    ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
    ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
    ({"type": "integer", "multipleOf": 1}, INTEGER),
    ({"minLength": 2.0}, {"minLength": 2}),
    ({"items": [TEXT], "additionalItems": False}, {"prefixItems": [TEXT], "items": False}),
    ({"items": [TEXT]}, {"prefixItems": [TEXT]}),
    ({"items": []}, {"prefixItems": []}),
    (objects(a=TEXT) | {"unevaluatedProperties": False}, objects(a=TEXT) | {"additionalProperties": False}),
    # llguidance allows a whole number that is excluded, if the other bound is less than 1 away.
    ({"exclusiveMinimum": 0, "maximum": 0.5}, {"minimum": 5e-7, "maximum": 0.5}),
    ({"exclusiveMaximum": 2, "exclusiveMinimum": 1.5}, {"exclusiveMinimum": 1.5, "maximum": 1.9999995}),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}),
    # What never ends is not begun.
    (
        objects(a={"$ref": "#/$defs/loop"}, b=TEXT) | {"$defs": {"loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}},
        objects(a=False, b=TEXT),
    ),
    (
        objects(a={"$ref": "#/$defs/d"}) | {"$defs": {"d": objects(d={"$ref": "#/$defs/d"}) | {"required": ["d"]}}},
        objects(a=False),
    ),
    (
        {"items": {"$ref": "#/$defs/list"}, "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}},
        {"items": {"$ref": "#/$defs/list"}, "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}},
    ),
    # Names that a pattern lists are properties.
    (objects(a=INTEGER) | {"patternProperties": {"^a$": {"title": "A"}}}, objects(a=INTEGER)),
    (
        objects(a=INTEGER) | {"patternProperties": {"^(?:a|b{2})$": {"minimum": 1}, "^x": TEXT}},
        objects(a={"allOf": [INTEGER, {"minimum": 1}]}, bb={"minimum": 1}) | {"patternProperties": {"^x": TEXT}},
    ),
    (
        {"patternProperties": {"^[ab]$": TEXT}, "additionalProperties": False, "minProperties": 2, "maxProperties": 2},
        {"properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False, "required": ["a", "b"]},
    ),
    (
        {"patternProperties": {"^a$": {}}, "additionalProperties": False, "minProperties": 1, "required": ["b"]},
        {"properties": {"a": {}}, "additionalProperties": False, "required": ["b"]},
    ),
    (
        objects(a={}, b={}) | {"additionalProperties": False, "minProperties": 2, "required": ["c"]},
        objects(a={}, b={}) | {"additionalProperties": False, "required": ["a", "b", "c"]},
    ),
    (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": TEXT, "properties": {"b": INTEGER, "c": {}}},
        {"properties": {"b": INTEGER, "a": TEXT}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"$ref": "#/$defs/N"}, "$defs": {"N": {"const": "a"}}},
        {"properties": {"a": {}}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"pattern": "^x"}, "additionalProperties": TEXT},
        {"patternProperties": {"^x": TEXT}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"maxLength": 2}},
        {"patternProperties": {"^(?s:.{0,2})$": {}}, "additionalProperties": False},
    ),
    # One of several is any of several where no value matches two.
    ({"oneOf": [TEXT, {"type": "null"}]}, {"anyOf": [TEXT, {"type": "null"}]}),
    ({"oneOf": [INTEGER, {"type": "number"}]}, {"oneOf": [INTEGER, {"type": "number"}]}),
    ({"oneOf": [{"const": True}, {"enum": [1, "a"]}]}, {"anyOf": [{"const": True}, {"enum": [1, "a"]}]}),
    # A text has no properties that could be wrong.
    ({"oneOf": [TEXT, {"properties": {"a": {}}}]}, {"oneOf": [TEXT, {"properties": {"a": {}}}]}),
    ({"oneOf": [TEXT, {"anyOf": [{"const": 1}, {}]}]}, {"oneOf": [TEXT, {"anyOf": [{"const": 1}, {}]}]}),
    ({"oneOf": [TEXT, {"anyOf": [{"const": 1}]}]}, {"anyOf": [TEXT, {"anyOf": [{"const": 1}]}]}),
    (
        {"oneOf": [TEXT, INTEGER], "anyOf": [TEXT, INTEGER]},
        {"anyOf": [TEXT, INTEGER], "allOf": [{"anyOf": [TEXT, INTEGER]}]},
    ),
]


@pytest.mark.parametrize(("schema", "plain"), REWRITTEN, ids=str)
def test_what_grammars_cannot_express_is_written_in_other_words(schema: dict[str, Any], plain: dict[str, Any]) -> None:
    assert plain_schema(schema) == plain


def test_models_told_apart_by_a_constant_are_any_of_them() -> None:
    kinds = {name: objects(kind={"const": name}) | {"required": ["kind"]} for name in ("Cat", "Dog")}
    schema = {"oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "$defs": kinds}
    assert plain_schema(schema) == {"anyOf": schema["oneOf"], "$defs": kinds}
    optional = {**schema, "$defs": {name: objects(kind={"const": name}) for name in kinds}}
    assert "oneOf" in plain_schema(optional)


@pytest.mark.parametrize("word", _WORDS)
def test_a_word_with_any_value_is_taken_or_refused(word: str) -> None:
    for value in _ODD:
        for schema in (
            {word: value},
            objects(p={word: value}),
            {"items": {word: value}, "$defs": {"x": {word: value}}},
        ):
            with suppress(UnsupportedSchemaError):
                plain_schema(schema)


@pytest.mark.parametrize("pattern", ["\\", "^a\\", "a\\\\\\", "[a]\\"])
def test_a_backslash_at_the_end_escapes_nothing(pattern: str) -> None:
    assert ends_in_escape(pattern)
    assert pattern_problem(pattern) == ESCAPE


@pytest.mark.parametrize(
    ("pattern", "at"),
    [("*", 0), ("a**", 2), ("a*??", 3), ("a{2}{3}", 4), ("(+)", 1), ("a|?", 2), ("^*", 1), ("x$+", 2)],
)
def test_something_must_precede_a_count(pattern: str, at: int) -> None:
    assert pattern_problem(pattern) == f"the regular expression has nothing to repeat at {at}"


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        r"a\\\\",
        "^[a-z*+?]{2,6}$",
        "[]*+]+",
        "[^]*+]+?",
        r"[\]*]*",
        "[a[*+]b]+",
        "(?:a|b)*?",
        "(?P<n>a)+",
        "(?<n>a){2}",
        "(?i)a",
        "(a?)*",
        "a{2,}?",
        r"\*+",
        r"\d{3}-\d{4}",
        "a{b",
        "}",
        "]",
    ],
)
def test_what_is_right_has_no_problem(pattern: str) -> None:
    assert pattern_problem(pattern) is None


def test_what_python_reads_has_no_problem() -> None:
    random = Random(7)
    for _ in range(5_000):
        pattern = "".join(random.choice("ab\\()[]*+?^$|-{}1,d") for _ in range(random.randint(1, 7)))
        # Python repeats groups of anchors, has possessive counts, and reads classes in another way.
        if "[" in pattern or re.search(r"[+*?}]\+|[\^$][*?{+]|\{,", pattern):
            continue
        try:
            re.compile(pattern)
        except re.error:
            continue
        assert pattern_problem(pattern) is None, pattern

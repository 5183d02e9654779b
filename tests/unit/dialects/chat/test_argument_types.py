"""The type of an argument without quotes is found wherever the schema has it."""

from typing import Any

import pytest

from caravan_dialects.chat.argument_types import ALL, property_schema, types_of

TEXT: dict[str, Any] = {"type": "string"}
ZIP: dict[str, Any] = {"type": "object", "properties": {"zip": TEXT}}
DEEP: dict[str, Any] = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)},
}


@pytest.mark.parametrize(
    "parameters",
    [
        ZIP,
        {"allOf": [ZIP]},
        {"anyOf": [ZIP, {"properties": {"other": {"type": "integer"}}}]},
        {"oneOf": [{"$ref": "#/$defs/Z"}, {"$ref": "#/$defs/Z"}], "$defs": {"Z": ZIP}},
        {"$ref": "#/$defs/Z", "$defs": {"Z": {"allOf": [{"$ref": "#/$defs/Y"}]}, "Y": ZIP}},
        {"patternProperties": {"^z": TEXT, "^o": {"type": "integer"}}},
        {"patternProperties": {"(z+)+$": TEXT}},
        {"additionalProperties": TEXT},
        {"properties": {"zip": {"allOf": [TEXT, {"anyOf": [TEXT, {"type": "null"}]}]}}},
        {"properties": {"zip": {"$ref": "#/properties/other"}, "other": TEXT}},
        {"properties": {"zip": {"allOf": [{"$ref": "#/x-parts/0"}]}}, "x-parts": [TEXT]},
    ],
    ids=str,
)
def test_a_text_is_a_text(parameters: dict[str, Any]) -> None:
    assert types_of(property_schema(parameters, "zip"), parameters) == {"string"}


def test_alternatives_have_the_types_of_all_and_parts_those_that_all_have() -> None:
    assert types_of({"anyOf": [TEXT, {"const": None}]}, {}) == {"string", "null"}
    assert types_of({"allOf": [{"type": "number"}, {"type": "integer"}]}, {}) == {"integer"}
    assert types_of({"type": ["string", "null"], "enum": ["a", 1]}, {}) == {"string"}
    assert types_of({"properties": {}}, {}) == {"object"}
    assert types_of({"allOf": [TEXT, {"type": "array"}]}, {}) == ALL


def test_references_without_end_are_given_up() -> None:
    for schema in ({"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, DEEP):
        assert types_of(schema, schema) == ALL
        assert property_schema(schema, "zip") == {}

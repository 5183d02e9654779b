"""Google's schemas, a subset of OpenAPI's, as JSON schemas."""

from typing import Any

import pytest

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.gemini.tools import json_schema_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "STRING", "description": "d"}, {"type": "string", "description": "d"}),
        ({"type": "TYPE_UNSPECIFIED"}, {}),
        ({"type": "string"}, {"type": "string"}),
        ({"type": ["STRING", "null"]}, {"type": ["string", "null"]}),
        ({"type": "ARRAY", "items": {"type": "NUMBER"}, "minItems": "1", "maxItems": 3},
         {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3}),
        ({"type": "ARRAY", "min_items": "x"}, {"type": "array", "minItems": "x"}),
        ({"type": "INTEGER", "nullable": True}, {"type": ["integer", "null"]}),
        ({"type": "INTEGER", "nullable": False}, {"type": "integer"}),
        ({"type": "STRING", "enum": ["a"], "nullable": True},
         {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}),
        ({"any_of": [{"type": "STRING"}, {"type": "NULL"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"type": "OBJECT", "properties": {"type": {"type": "STRING"}}, "additional_properties": False},
         {"type": "object", "properties": {"type": {"type": "string"}}, "additionalProperties": False}),
        ({"defs": {"a": {"type": "STRING"}}, "ref": "#/$defs/a"},
         {"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}),
        ({"type": "OBJECT", "properties": {"a": {"type": "STRING"}}},
         {"type": "object", "properties": {"a": {"type": "string"}}}),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "STRING"}},
         {"properties": {"a": {}}, "additionalProperties": {"type": "string"}}),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {"type": "STRING"}}}]},
         {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {"type": "string"}}}]}),
        # What is no schema is left to the check of all schemas.
        ({"properties": 5, "anyOf": {}, "items": True, "type": 5},
         {"properties": 5, "anyOf": {}, "items": True, "type": 5}),
    ],
)  # fmt: skip
def test_what_a_schema_means(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert json_schema_of("f", given) == expected


def test_properties_come_in_the_order_that_is_asked_for() -> None:
    properties = {name: {"type": "STRING"} for name in "abc"}
    for order, expected in ((["c", "x", "a"], "cab"), (["c", 5, ["a"]], "cab"), ("c", "abc"), (None, "abc")):
        made = json_schema_of("f", {"properties": properties, "propertyOrdering": order})
        assert "".join(made["properties"]) == expected
        assert "propertyOrdering" not in made


def test_a_schema_that_is_nested_too_deeply() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"items": schema}
    with pytest.raises(ValidationError, match="`f` must be nested at most"):
        json_schema_of("f", schema)

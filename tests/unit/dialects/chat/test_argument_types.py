"""The types of arguments without quotes are found wherever the schema has them, also in tags within tags."""

import json
from typing import Any

import pytest

from caravan_dialects.chat.argument_types import ALL, property_schema, types_of
from caravan_dialects.chat.tag_reader import nested_json
from caravan_dialects.chat.tool_format import KEY, Tags

TEXT: dict[str, Any] = {"type": "string"}
ZIP: dict[str, Any] = {"type": "object", "properties": {"zip": TEXT}}
DEEP: dict[str, Any] = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)},
}
TAGS = Tags(key_opening="<", key_closing=">", value_closing=f"</{KEY}>")
STRINGS = {"type": "array", "items": {"type": "string"}}
LOOSE: dict[str, Any] = {}


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


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("<deep><item>1</item><item>2</item></deep>", LOOSE, {"deep": [1, 2]}),
        (" <item>a b</item>\n<item></item> ", STRINGS, ["a b", ""]),
        ("<item>01</item>", STRINGS, ["01"]),
        ("<item><a>1</a></item><item><a>2</a></item>", LOOSE, [{"a": 1}, {"a": 2}]),
        ("<item>1</item>", {"type": "object", "properties": {"item": {"type": "string"}}}, {"item": "1"}),
        ("<a><a>1</a></a><b>x</b>", LOOSE, {"a": {"a": 1}, "b": "x"}),
        ("<a>{&quot;</a>", {"properties": {"a": {"type": "string"}}}, {"a": "{&quot;"}),
        ('<a">1</a">', LOOSE, {'a"': 1}),
    ],
)
def test_tags_are_keys_and_items_make_lists(text: str, schema: dict[str, Any], expected: Any) -> None:
    found = nested_json(text, TAGS, schema, schema)
    assert found is not None
    assert json.loads(found) == expected


@pytest.mark.parametrize("text", ["", "x", "[1, 2]", "<a>1", "<a>1</b>", "<a>1</a>x", "<a", "1<a>2</a>"])
def test_what_is_not_made_of_tags_is_left(text: str) -> None:
    assert nested_json(text, TAGS, LOOSE, None) is None


def test_what_is_too_deep_is_a_text() -> None:
    text = "<a>" * 40 + "1" + "</a>" * 40
    found = json.loads(nested_json(text, TAGS, LOOSE, None) or "")
    for _ in range(32):
        found = found["a"]
    assert found == "<a>" * 8 + "1" + "</a>" * 8

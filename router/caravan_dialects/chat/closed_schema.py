"""The schemas of arguments as a grammar needs them."""

from collections.abc import Mapping
from typing import Any

from caravan_dialects.chat.plain_schema import DEFINITIONS, plain_schema

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords that let an object have properties which its ``properties`` do not name.
_OPENING = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
    }
)
# Keywords that say what kind of value matches, if there is no ``type``.
_KINDS = frozenset({"type", "const", "enum", "allOf", "anyOf", "oneOf", "$ref"})


def parameters_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments, as a grammar needs it. Raises UnsupportedSchemaError."""
    plain = plain_schema(parameters or _NO_PARAMETERS)
    return closed(plain if _KINDS & plain.keys() else {"type": "object", **plain})


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Allow only named properties in objects of ``schema``: a weak model could invent others without end."""
    result = dict(schema)
    if isinstance(properties := schema.get("properties"), Mapping):
        result["properties"] = {
            name: closed(inner) if isinstance(inner, Mapping) else inner for name, inner in properties.items()
        }
        if not _OPENING & schema.keys() and properties.keys() >= set(schema.get("required", ())):
            result["additionalProperties"] = False
    if isinstance(items := schema.get("items"), Mapping):
        result["items"] = closed(items)
    return result


def without_definitions(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``schema`` into itself and the targets of its references."""
    definitions = {DEFINITIONS: schema[DEFINITIONS]} if DEFINITIONS in schema else {}
    return {key: value for key, value in schema.items() if key not in definitions}, definitions


def json_layout(*, compact: bool) -> dict[str, Any]:
    """Return the white space of JSON as Python's json writes it, which is what templates show.

    A weak model may write optional space forever.
    """
    return {
        "whitespace_flexible": False,
        "key_separator": ":" if compact else ": ",
        "item_separator": "," if compact else ", ",
    }

"""Translates Google's schemas, a subset of OpenAPI's, into JSON schemas."""

from typing import Any

from caravan_dialects.api.openai.chat.messages import check_depth

Json = dict[str, Any]

# Protobuf's JSON has these as texts, since they are 64 bits long.
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_NAMED = frozenset({"properties", "$defs"})
_LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
# Written with underscores, or without the "$" that Protobuf's names cannot have.
_OTHER_NAMES = {
    "any_of": "anyOf",
    "one_of": "oneOf",
    "prefix_items": "prefixItems",
    "additional_properties": "additionalProperties",
    "property_ordering": "propertyOrdering",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "defs": "$defs",
    "ref": "$ref",
}
_ORDER = "propertyOrdering"


def json_schema_of(field: str, schema: Json) -> Json:
    """Return the JSON schema that ``schema`` means, which may also be one itself. Raises ValidationError.

    Types are written in lower case, ``nullable`` becomes one more type, and properties come in the order of
    ``propertyOrdering``, in which the model writes them.
    """
    check_depth(field, schema)
    return _translated(schema)


def _translated(schema: Json) -> Json:
    given = {_OTHER_NAMES.get(key, key): value for key, value in schema.items()}
    made: Json = {}
    for key, value in given.items():
        if key == "type":
            if (kind := _type(value)) is not None:
                made[key] = kind
        elif key in _COUNTS:
            made[key] = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: _inner(one) for name, one in _ordered(value, given.get(_ORDER)).items()}
        elif key in _LISTED and isinstance(value, list):
            made[key] = [_inner(one) for one in value]
        elif key in {"items", "additionalProperties"}:
            made[key] = _inner(value)
        elif key not in {_ORDER, "nullable"}:
            made[key] = value
    return _nullable(made) if given.get("nullable") is True else made


def _inner(value: Any) -> Any:
    return _translated(value) if isinstance(value, dict) else value


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return [_type(one) for one in value]
    if not isinstance(value, str):
        return value
    return None if value == "TYPE_UNSPECIFIED" else value.lower()


def _ordered(properties: Json, order: Any) -> Json:
    if not isinstance(order, list):
        return properties
    first = {name: properties[name] for name in order if isinstance(name, str) and name in properties}
    return first | properties


def _nullable(schema: Json) -> Json:
    """Return the schema of ``schema``'s values and null."""
    if isinstance(kind := schema.get("type"), str) and "enum" not in schema and not _LISTED & schema.keys():
        return schema | {"type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}

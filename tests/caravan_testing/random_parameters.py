"""Makes random schemas of a function's parameters, with all kinds of references and with what constrains nothing."""

import random
from typing import Any

from caravan_testing.random_schemas import SchemaMaker

Schema = dict[str, Any]

_NOTES: tuple[Schema, ...] = (
    {"description": "d", "title": "t", "examples": [{"type": "null"}], "default": {"$ref": "#/nowhere"}},
    {"deprecated": True, "readOnly": True, "x-order": 3, "$comment": "c", "contentEncoding": "base64"},
    {"minLength": 0, "minItems": 0, "minProperties": 0, "uniqueItems": False, "propertyNames": {"type": "string"}},
)
_TARGET = {"enum": ["description", 7, {"title": [None]}]}


def random_parameters(seed: int) -> Schema:
    """Return the schema of ``seed``: of an object, and so small that a matching text need not be long."""
    source = random.Random(seed)
    given = SchemaMaker(source).make()
    definitions = {**given.pop("$defs", {}), **_definitions()}
    parts = _parts()
    names = source.sample(sorted(parts), source.randrange(1, 4))
    properties = {"v": given, "description": {"type": "boolean"}} | {name: parts[name] for name in names}
    if source.random() < 0.3:
        properties["kids"] = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    noted = {name: schema | source.choice(_NOTES) for name, schema in properties.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": noted,
        "required": [*properties],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _definitions() -> Schema:
    cat, dog = (_object(kind={"const": kind}, **{kind: {"type": "boolean"}}) for kind in ("cat", "dog"))
    inside = {"$id": "inside", **_object(near={"$ref": "#/$defs/near"}), "$defs": {"near": {"const": "near"}}}
    return {"a/b~%": _TARGET, "spot": {"$anchor": "spot", **_TARGET}, "cat": cat, "dog": dog, "inside": inside}


def _parts() -> dict[str, Schema]:
    """Return schemas by the names of their properties, to which some of them refer."""
    few = {"type": "object", "additionalProperties": False}
    tree = {"type": "array", "items": {"$ref": "#/properties/tree"}, "maxItems": 2}
    own = _object(e={"$ref": "#/properties/own/$defs/E"}) | {"$defs": {"E": _TARGET}}
    return {
        "anchored": {"$ref": "#spot"},
        "bounded": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**63 - 1},
        "escaped": {"$ref": "#/$defs/a~1b~0%25"},
        "inside": {"$ref": "inside"},
        "listed": few | {"patternProperties": {"^(x|y)$": {"type": "boolean"}}, "properties": {"x": {"const": True}}},
        "map": few | {"additionalProperties": {"type": "null"}, "propertyNames": {"enum": ["m", "n"]}},
        "near": {"$ref": "inside#/$defs/near"},
        "one": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null", "format": "none"}]},
        "own": own,
        "tree": tree,
        "twice": {"$ref": "#/properties/v"},
    }


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

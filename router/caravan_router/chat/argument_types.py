"""The types of arguments that are written without quotes, as the schema of the function's parameters has them."""

import ast
from collections.abc import Mapping
from typing import Any

import msgspec

Schema = Mapping[str, Any]

ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES = 16
_JSON_TYPES: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)


def property_schema(parameters: Schema | None, key: str) -> Schema:
    """Return the schema of the argument ``key``; an empty one if there is none."""
    properties = resolved(parameters or {}, parameters).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def resolved(schema: Schema, root: Schema | None) -> Schema:
    """Follow the references of ``schema`` inside ``root``."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, Mapping) else None
        if not isinstance(target, Mapping):
            return {}
        schema = target
    return {}


def types_of(schema: Schema, root: Schema | None, depth: int = _MAX_REFERENCES) -> frozenset[str]:
    """Return the types, in JSON's words, that ``schema`` allows; all if it does not say."""
    schema = resolved(schema, root)
    match schema.get("type"):
        case str(kind):
            return frozenset({kind})
        case list(kinds):
            return frozenset(kind for kind in kinds if isinstance(kind, str)) or ALL
        case _:
            pass
    if "const" in schema:
        return _types(schema["const"])
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset[str]().union(*map(_types, values))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list) and depth:
            found = [types_of(option, root, depth - 1) for option in options if isinstance(option, Mapping)]
            return frozenset[str]().union(*found) or ALL
    return frozenset({"object"}) if "properties" in schema else ALL


def _types(value: Any) -> frozenset[str]:
    return next((kinds for known, kinds in _JSON_TYPES if isinstance(value, known)), ALL)


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of an argument that a model wrote as ``text``, and that is of one of the types ``kinds``.

    What is none of them stays a string.
    """
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    value = _decoded(bare)
    if value is not _NOTHING and _types(value) & (kinds - {"string"}):
        return bare
    if "string" not in kinds:
        # Models write Python's lists and dictionaries, too.
        if bare[:1] in ("[", "{") and (literal := _literal(bare)) is not _NOTHING and _types(literal) & kinds:
            return msgspec.json.encode(literal).decode()
        if isinstance(value, str):
            return bare
    return msgspec.json.encode(text).decode()


_NOTHING = object()


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _NOTHING


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
        msgspec.json.encode(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return _NOTHING
    return value

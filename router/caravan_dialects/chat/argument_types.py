"""The types of arguments that are written without quotes, as the schema of the function's parameters has them."""

import ast
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

Schema = Mapping[str, Any]

ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES = 16
# Schemas that are looked at for one argument.
_MAX_VISITS = 1000
_MAX_DEPTH = 64
# Of an index in a reference.
_MAX_DIGITS = 6
# Words that tell the type of a schema without one.
_TELLING = (("properties", "object"), ("items", "array"), ("prefixItems", "array"))
_JSON_TYPES: tuple[tuple[type, frozenset[str]], ...] = (
    (bool, frozenset({"boolean"})),
    (int, frozenset({"integer", "number"})),
    (float, frozenset({"number"})),
    (str, frozenset({"string"})),
    (list, frozenset({"array"})),
    (dict, frozenset({"object"})),
    (type(None), frozenset({"null"})),
)


def property_schema(schema: Schema | None, key: str, root: Schema | None = None) -> Schema:
    """Return the schema of the property ``key``, whatever part of ``schema`` has it; an empty one if there is none.

    ``root``: the schema that holds what ``schema`` refers to, if that is not ``schema`` itself.
    """
    return _Reading(schema if root is None else root).property(schema or {}, key) or {}


def resolved(schema: Schema, root: Schema | None) -> Schema:
    """Follow the references of ``schema`` inside ``root``."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _schema(target_of(reference, root))
    return {}


def target_of(reference: str, root: Schema | None) -> Any:
    """Return what ``reference`` points to inside ``root``; None if that is nothing."""
    if not reference.startswith("#"):
        return None
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and len(name) < _MAX_DIGITS:
            target = target[int(name)] if int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target if reference == "#" or reference.startswith("#/") else None


def types_of(schema: Schema, root: Schema | None) -> frozenset[str]:
    """Return the types, in JSON's words, that ``schema`` allows; all if it does not say."""
    found = _Reading(root).types(schema)
    # A number may be whole.
    return (found - {"integer"} if "number" in found and found != ALL else found) or ALL


class _Reading:
    """Looks behind references and combinators, of which there may be very many: it gives up after some."""

    def __init__(self, root: Schema | None) -> None:
        self._root = root
        self._left = _MAX_VISITS

    def property(self, schema: Any, key: str, depth: int = _MAX_DEPTH) -> Schema | None:
        """Return what ``schema`` says of its property ``key``; None if it says nothing."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or not depth:
            return None
        found = _own_property(schema, key)
        if isinstance(reference := schema.get("$ref"), str):
            found.append(self.property(target_of(reference, self._root), key, depth - 1))
        found += [self.property(part, key, depth - 1) for part in parts_of(schema, "allOf")]
        for name in ("anyOf", "oneOf"):
            # Parts that do not name it leave it out.
            options = [self.property(option, key, depth - 1) for option in parts_of(schema, name)]
            if known := [option for option in options if option is not None]:
                found.append({"anyOf": known})
        said = [part for part in found if part is not None]
        return {"allOf": said} if len(said) > 1 else said[0] if said else None

    def types(self, schema: Any, depth: int = _MAX_DEPTH) -> frozenset[str]:
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0 or not depth:
            return ALL
        found = _own_types(schema)
        if isinstance(reference := schema.get("$ref"), str):
            found &= self.types(target_of(reference, self._root), depth - 1)
        for part in parts_of(schema, "allOf"):
            found &= self.types(part, depth - 1)
        for name in ("anyOf", "oneOf"):
            if options := parts_of(schema, name):
                found &= frozenset[str]().union(*(self.types(option, depth - 1) for option in options))
        return found


def parts_of(schema: Schema, combinator: str) -> list[Any]:
    """Return the schemas that ``combinator`` combines."""
    return parts if isinstance(parts := schema.get(combinator), list) else []


def _own_property(schema: Schema, key: str) -> list[Schema | None]:
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    found: list[Schema | None] = []
    if isinstance(properties, Mapping) and key in properties:
        found.append(properties[key] if isinstance(properties[key], Mapping) else {})
    if isinstance(patterns, Mapping):
        matching = {pattern: may_match(pattern, key) for pattern in patterns}
        found += [_schema(patterns[pattern]) for pattern, matches in matching.items() if matches is True]
        if not found and (possible := [patterns[pattern] for pattern, matches in matching.items() if matches is None]):
            found.append({"anyOf": possible})
    if not found and isinstance(more := schema.get("additionalProperties"), Mapping) and more:
        found.append(more)
    return found


def _schema(value: Any) -> Schema:
    return value if isinstance(value, Mapping) else {}


def may_match(pattern: str, text: str) -> bool | None:
    """Whether ``pattern`` matches somewhere in ``text``; None if that could take long, or if it is no pattern."""
    if sum(map(pattern.count, "*+?{")) > 1 or "(" in pattern:
        return None
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return None


def _own_types(schema: Schema) -> frozenset[str]:
    match schema.get("type"):
        case str(kind):
            found = frozenset({kind})
        case list(kinds) if kinds:
            found = frozenset(kind for kind in kinds if isinstance(kind, str))
        case _:
            found = ALL
    if "number" in found:
        found |= {"integer"}
    if "const" in schema:
        found &= json_types(schema["const"])
    if isinstance(values := schema.get("enum"), list) and values:
        found &= frozenset[str]().union(*map(json_types, values))
    if found != ALL:
        return found
    return next((frozenset({kind}) for word, kind in _TELLING if word in schema), ALL)


def json_types(value: Any) -> frozenset[str]:
    return next((kinds for known, kinds in _JSON_TYPES if isinstance(value, known)), ALL)


def json_of(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of an argument that a model wrote as ``text``, and that is of one of the types ``kinds``.

    What is none of them stays a string.
    """
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    value = _decoded(bare)
    if value is not _NOTHING and json_types(value) & (kinds - {"string"}):
        return bare
    if "string" not in kinds:
        # Models write Python's lists and dictionaries, too.
        if bare[:1] in ("[", "{") and (literal := _literal(bare)) is not _NOTHING and json_types(literal) & kinds:
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

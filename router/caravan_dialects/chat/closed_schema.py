"""Closes the objects of schemas, for a grammar: a weak model could invent further properties without end.

An object has no properties but those that are named, if ``properties`` are given and nothing says otherwise. It is
closed over the names of all schemas that apply to it: its own, those of ``allOf`` and ``$ref``, and those of the option
of ``anyOf`` that it matches. Whatever matches the closed schema matches the schema.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from caravan_dialects.chat.plain_schema import DEFINITIONS, plain_schema
from caravan_dialects.chat.schema_references import UnsupportedSchemaError

Json = dict[str, Any]

_NO_PARAMETERS = {"type": "object", "properties": {}}
# Keywords that say what kind of value matches, if there is no ``type``.
_KINDS = frozenset({"type", "const", "enum", "allOf", "anyOf", "oneOf", "$ref"})
_LISTS = ("allOf", "anyOf", "oneOf")
# Keywords with which properties that are not named may be needed. A plain schema has `minProperties` only where it
# needs others, and `oneOf` only where it is not known whether its parts exclude each other: closed ones might where
# open ones do not.
_SAYING = frozenset({"additionalProperties", "patternProperties", "minProperties", "oneOf"})
_OF_OBJECTS = _SAYING | {"properties", "required", "maxProperties", "const", "enum"}
_PREFIX = f"#/{DEFINITIONS}/"
# The names of definitions have an underscore only before a number.
_OPEN_SUFFIX = "_open"
# A constraint has no room for as many names.
_MOST_STEPS = 1 << 16


def parameters_schema(parameters: Mapping[str, Any] | None) -> Json:
    """Return the schema of a function's arguments, as a grammar needs it. Raises UnsupportedSchemaError."""
    plain = plain_schema(parameters or _NO_PARAMETERS)
    return _closed(plain if _KINDS & plain.keys() else {"type": "object", **plain})


def closed_schema(schema: Mapping[str, Any]) -> Json:
    """Return ``schema`` in the form of `plain_schema`, with its objects closed. Raises UnsupportedSchemaError."""
    return _closed(plain_schema(schema))


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


def _closed(plain: Json) -> Json:
    try:
        return _Closing(plain).whole()
    except RecursionError:
        raise UnsupportedSchemaError("it is nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Names:
    """What the schemas of one object say of its properties.

    ``names``: of all that are named, in order. ``given``: one of the schemas has ``properties``. ``said``: one of them
    says which others there are.
    """

    names: dict[str, None] = field(default_factory=dict)
    given: bool = False
    said: bool = False


_NOTHING = _Names()


class _Closing:
    """Closes a plain schema. A definition that applies beside other schemas has an open form, too."""

    def __init__(self, plain: Json) -> None:
        self._root, definitions = without_definitions(plain)
        self._sources: Json = definitions.get(DEFINITIONS, {})
        self._used: set[str] = set()
        self._waiting: deque[str] = deque()
        self._left = _MOST_STEPS

    def whole(self) -> Json:
        closed: Json = self._closed(self._root)
        definitions: Json = {}
        while self._waiting:
            name = self._waiting.popleft()
            source = name.removesuffix(_OPEN_SUFFIX)
            definitions[name] = (self._closed if source == name else self._open)(self._sources[source])
        return {**closed, DEFINITIONS: definitions} if definitions else closed

    def _closed(self, schema: Json | bool, context: _Names = _NOTHING) -> Any:
        """Return ``schema`` closed over its names and those of ``context``: what else applies to the same value."""
        if isinstance(schema, bool):
            return schema
        combined = [key for key in (*_LISTS, "$ref") if key in schema]
        if context is _NOTHING and len(combined) == 1 and not _OF_OBJECTS & schema.keys():
            # Nothing applies beside the one that is combined, so that it closes itself.
            key, value = combined[0], schema[combined[0]]
            if key == "$ref":
                return self._with_children(schema) | {key: self._reference(value)}
            if key == "anyOf" or (key == "allOf" and len(value) == 1):
                return self._with_children(schema) | {key: [self._closed(each) for each in value]}
        opened = self._open(schema)
        if self._left < 0 or not _may_be_object(schema):
            return opened
        options = schema.get("anyOf")
        known = self._names(context, {key: value for key, value in schema.items() if key != "anyOf"})
        if known.said:
            return opened
        if options is not None:
            return opened | {"anyOf": [self._closed(option, known) for option in options]}
        if not known.given:
            return opened
        own = opened.get("properties", {})
        properties = own | {name: {} for name in known.names if name not in own}
        return opened | {"properties": properties, "additionalProperties": False}

    def _open(self, schema: Json | bool) -> Any:
        """Return ``schema`` with what is within closed, but not the object that it applies to itself."""
        if isinstance(schema, bool):
            return schema
        opened = self._with_children(schema)
        if "$ref" in schema:
            opened["$ref"] = self._reference(schema["$ref"], _OPEN_SUFFIX)
        return opened | {key: [self._open(each) for each in schema[key]] for key in _LISTS if key in schema}

    def _with_children(self, schema: Json) -> Json:
        result = dict(schema)
        for key in ("properties", "patternProperties"):
            if key in schema:
                result[key] = {name: self._closed(inner) for name, inner in schema[key].items()}
        for key in ("items", "additionalProperties"):
            if key in schema:
                result[key] = self._closed(schema[key])
        if "prefixItems" in schema:
            result["prefixItems"] = [self._closed(inner) for inner in schema["prefixItems"]]
        return result

    def _reference(self, reference: str, suffix: str = "") -> str:
        name = reference.removeprefix(_PREFIX) + suffix
        if name not in self._used:
            self._used.add(name)
            self._waiting.append(name)
        return f"{_PREFIX}{name}"

    def _names(self, context: _Names, schema: Json) -> _Names:
        """Return what ``schema``, all that it combines, and ``context`` say."""
        names, given, said = dict(context.names), context.given, context.said
        seen = set[str]()
        waiting: deque[Json | bool] = deque([schema])
        self._left -= len(names)
        while waiting and self._left >= 0:
            part = waiting.popleft()
            if isinstance(part, bool):
                continue
            found = (*part.get("properties", ()), *part.get("required", ()))
            names |= dict.fromkeys(found)
            given = given or "properties" in part
            said = said or _says(part)
            waiting += [each for key in _LISTS for each in part.get(key, ())]
            if "$ref" in part and part["$ref"] not in seen:
                seen.add(part["$ref"])
                waiting.append(self._sources[part["$ref"].removeprefix(_PREFIX)])
            self._left -= 1 + len(found)
        # A schema too large for this is not closed.
        return _Names(names, given, said or self._left < 0)


def _may_be_object(schema: Json) -> bool:
    kinds = schema.get("type", "object")
    return "object" in ([kinds] if isinstance(kinds, str) else kinds)


def _says(schema: Json) -> bool:
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    return bool(_SAYING & schema.keys()) or any(isinstance(value, Mapping) for value in values)

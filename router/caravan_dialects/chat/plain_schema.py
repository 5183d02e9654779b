"""Writes a client's schema in the form that grammars are made of.

What constrains nothing is left out, such as descriptions and formats that JSON Schema does not define. References are
replaced by references to definitions at the root, so that the schema means the same within another. What cannot be
enforced is refused with its place.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from caravan_dialects.chat.argument_types import ALL
from caravan_dialects.chat.disjoint_schemas import Comparison
from caravan_dialects.chat.endless_schema import without_endless
from caravan_dialects.chat.schema_numbers import bounds, check_constant, check_multiple
from caravan_dialects.chat.schema_objects import with_allowed_names, with_listed_names
from caravan_dialects.chat.schema_problem import Path, UnsupportedSchemaError
from caravan_dialects.chat.schema_references import References, Resource, Target, entered
from caravan_dialects.chat.schema_strings import check_pattern, string_rules

Json = dict[str, Any]

DEFINITIONS = "$defs"
# A grammar of as many parts would be too large.
_MOST_SCHEMAS = 1 << 14
_LISTS = frozenset({"anyOf", "oneOf", "allOf"})
_BY_NAME = frozenset({"properties", "patternProperties"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_STRINGS = frozenset({"pattern", "format"})
_LEAST = frozenset({"minLength", "minItems", "minProperties"})
_MOST = frozenset({"maxLength", "maxItems", "maxProperties"})
# No output is as long, and some larger numbers cannot be written in a regular expression.
_NO_LIMIT = 2**31
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that constrain values in ways that a grammar cannot, unless they say nothing.
_UNENFORCED = ("not", "if", "contains", "uniqueItems", "dependentRequired", "dependentSchemas", "dependencies")
_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_CONSTRAINING = frozenset(
    {
        *_LISTS,
        *_BY_NAME,
        *_NUMBERS,
        *_STRINGS,
        *_LEAST,
        *_MOST,
        *_REFERENCES,
        *_UNENFORCED,
        *_UNEVALUATED,
        *("additionalProperties", "propertyNames", "required", "items", "prefixItems"),
        *("type", "const", "enum", "multipleOf"),
    }
)
_MOST_REFERENCES = 16
# Keywords behind which a part of an object or a list may have been evaluated.
_APPLICATORS = _LISTS | {*_REFERENCES, "if"}


def plain_schema(schema: Mapping[str, Any]) -> Json:
    """Return ``schema`` in a form that has constraints only, and no reference but to its own ``$defs``.

    Raises UnsupportedSchemaError.
    """
    try:
        return _Writer(schema).whole()
    except RecursionError:
        raise UnsupportedSchemaError("it is nested too deeply") from None


class _Writer:
    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._source = schema
        self._references = References(schema)
        self._names: dict[tuple[int, str], str] = {}
        self._taken: dict[str, int] = {}
        self._waiting: deque[tuple[str, Target]] = deque()
        self._alternatives: list[Json] = []
        self._left = _MOST_SCHEMAS

    def whole(self) -> Json:
        resource = self._references.resource
        root = self._mapping(self._source, resource, ())
        definitions: Json = {}
        while self._waiting:
            name, target = self._waiting.popleft()
            definitions[name] = self._schema(target.schema, target.resource, target.path)
        if definitions:
            root[DEFINITIONS] = definitions
        comparison = Comparison(root)
        for schema in self._alternatives:
            _decide(schema, comparison)
        finite = without_endless(root)
        if isinstance(finite, bool):
            raise UnsupportedSchemaError("it refers to itself without an end")
        return finite

    def _schema(self, schema: Any, resource: Resource, path: Path) -> Json | bool:
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, Mapping):
            raise UnsupportedSchemaError("it must be a schema: an object, true or false", path)
        return self._mapping(schema, resource, path)

    def _mapping(self, schema: Mapping[str, Any], resource: Resource, path: Path) -> Json:
        self._left -= 1
        if self._left < 0:
            raise UnsupportedSchemaError(f"it must have at most {_MOST_SCHEMAS} schemas within it")
        resource = entered(resource, schema, path)

        def inner(value: Any, *steps: str | int) -> Json | bool:
            return self._schema(value, resource, (*path, *steps))

        plain: Json = {}
        for key, value in schema.items():
            plain |= self._keyword(key, value, schema, path, inner)
        for key in _REFERENCES:
            if key in schema:
                if "$ref" in plain or (key != "$ref" and self._references.has_parts):
                    raise UnsupportedSchemaError("it cannot be enforced", (*path, key))
                plain["$ref"] = self._reference(schema[key], resource, (*path, key))
        if _NUMBERS & schema.keys():
            plain |= bounds(schema, path)
        if _STRINGS & schema.keys():
            plain |= string_rules(schema, path)
        _check_unenforced(schema, path)
        for pattern in plain.get("patternProperties", ()):
            check_pattern(pattern, (*path, "patternProperties"))
        if "propertyNames" in schema:
            names = self._followed(schema["propertyNames"], resource, (*path, "propertyNames"))
            plain = with_allowed_names(plain, names, path)
        plain = with_listed_names(plain, path)
        if "oneOf" in plain:
            self._alternatives.append(plain)
        return plain

    def _keyword(
        self, key: str, value: Any, schema: Mapping[str, Any], path: Path, inner: Callable[..., Json | bool]
    ) -> Json:
        """Return what ``key`` constrains; nothing if it does not, or is written elsewhere."""
        if key in _LISTS or key == "prefixItems":
            if not isinstance(value, list) or not value:
                raise UnsupportedSchemaError("it must be a list of schemas, not an empty one", (*path, key))
            return {key: [inner(each, key, index) for index, each in enumerate(value)]}
        if key in _BY_NAME:
            if not isinstance(value, Mapping):
                raise UnsupportedSchemaError("it must be an object of schemas", (*path, key))
            return {key: {name: inner(each, key, name) for name, each in value.items()}}
        if key in _LEAST or key in _MOST:
            count = _count(value, (*path, key))
            return {} if (count == 0 if key in _LEAST else count >= _NO_LIMIT) else {key: count}
        match key:
            case "type":
                if not all(
                    isinstance(kind, str) and kind in ALL for kind in (value if isinstance(value, list) else [value])
                ):
                    reason = f"it must be one of {', '.join(sorted(ALL))}, or a list of them. Given: {str(value)[:40]}"
                    raise UnsupportedSchemaError(reason, (*path, key))
                return {key: value}
            case "enum" if not isinstance(value, list):
                raise UnsupportedSchemaError("it must be a list", (*path, key))
            case "const" | "enum":
                check_constant(value, (*path, key))
                return {key: value}
            case "required":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    raise UnsupportedSchemaError("it must be a list of names", (*path, key))
                return {key: value} if value else {}
            case "items" if isinstance(value, list):
                # Before `prefixItems` there were lists of schemas here.
                plain: Json = {"prefixItems": [inner(each, key, index) for index, each in enumerate(value)]}
                if "additionalItems" in schema:
                    plain["items"] = inner(schema["additionalItems"], "additionalItems")
                return plain
            case "items" | "additionalProperties":
                return {key: inner(value, key)}
            case "multipleOf":
                check_multiple(value, (*path, key))
                return {} if value == 1 and schema.get("type") == "integer" else {key: value}
            case "unevaluatedProperties" | "unevaluatedItems":
                return self._unevaluated(key, value, schema, path, inner)
            case _:
                return {}

    def _unevaluated(
        self, key: str, value: Any, schema: Mapping[str, Any], path: Path, inner: Callable[..., Json | bool]
    ) -> Json:
        """Return the older keyword, which means the same where nothing else of the schema applies to the part."""
        older = _UNEVALUATED[key]
        if older in schema:
            return {}
        if says_nothing(value):
            # It says that an object has other properties, which closes none.
            return {older: {}} if older == "additionalProperties" else {}
        if _APPLICATORS & schema.keys():
            raise UnsupportedSchemaError("it cannot be enforced beside references and combinations", (*path, key))
        return {older: inner(value, key)}

    def _reference(self, reference: Any, resource: Resource, path: Path) -> str:
        target = self._target(reference, resource, path)
        key = (id(target.schema), target.resource.uri)
        if key not in self._names or isinstance(target.schema, bool):
            self._names[key] = self._new_name(target)
            self._waiting.append((self._names[key], target))
        return f"#/{DEFINITIONS}/{self._names[key]}"

    def _target(self, reference: Any, resource: Resource, path: Path) -> Target:
        if not isinstance(reference, str):
            raise UnsupportedSchemaError("it must be a string", path)
        target = self._references.target(reference, resource)
        if target is None:
            reason = f"`{reference[:100]}` does not exist within the schema, and nothing is fetched"
            raise UnsupportedSchemaError(reason, path)
        return target

    def _followed(self, schema: Any, resource: Resource, path: Path) -> Json | bool:
        """Return ``schema``, or if it is no more than a reference, what that means."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(schema, Mapping) or schema.keys() & _CONSTRAINING != {"$ref"}:
                break
            target = self._target(schema["$ref"], entered(resource, schema, path), (*path, "$ref"))
            schema, resource, path = target.schema, target.resource, target.path
        return self._schema(schema, resource, path)

    def _new_name(self, target: Target) -> str:
        last = str(target.path[-1]) if target.path else "root"
        # Nothing that a pointer would have to escape, and no underscore, which precedes the number.
        base = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in last[:40])
        number = self._taken[base] = self._taken.get(base, 0) + 1
        return base if number == 1 else f"{base}_{number}"


def says_nothing(schema: Any) -> bool:
    """Whether any value matches ``schema``, because it has annotations only."""
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() & _CONSTRAINING)


def _count(value: Any, path: Path) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UnsupportedSchemaError(f"it must be a whole number >= 0. Given: {str(value)[:40]}", path)
    return value


def _check_unenforced(schema: Mapping[str, Any], path: Path) -> None:
    for key in _UNENFORCED:
        if key not in schema:
            continue
        value = schema[key]
        match key:
            case "not":
                idle = value is False
            case "if":
                idle = all(says_nothing(schema.get(branch, True)) for branch in ("then", "else"))
            case "contains":
                idle = schema.get("minContains") == 0 and "maxContains" not in schema
            case "uniqueItems":
                most = schema.get("maxItems")
                idle = value is False or (isinstance(most, int) and most <= 1)
            case _:
                idle = value == {}
        if not idle:
            raise UnsupportedSchemaError("it cannot be enforced", (*path, key))


def _decide(schema: Json, comparison: Comparison) -> None:
    """Write one of several schemas as any of them if no value matches two."""
    options = schema["oneOf"]
    if len(options) > 1 and not comparison.are_disjoint(options):
        return
    del schema["oneOf"]
    if "anyOf" in schema:
        schema.setdefault("allOf", []).append({"anyOf": options})
    else:
        schema["anyOf"] = options

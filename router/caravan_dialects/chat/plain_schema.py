"""Writes a client's schema in the form that grammars are made of.

What constrains nothing is left out, such as descriptions and formats that JSON Schema does not define. References are
replaced by references to definitions at the root, so that the schema means the same within another. What cannot be
enforced is refused with its place.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from caravan_dialects.chat.argument_types import ALL, Schema, resolved
from caravan_dialects.chat.schema_objects import with_allowed_names, with_listed_names
from caravan_dialects.chat.schema_references import Path, References, Resource, Target, UnsupportedSchemaError, entered
from caravan_dialects.chat.schema_values import bounds, check_constant, check_multiple, check_pattern, string_rules

_MAX_DEPTH = 4
# Schemas of clients may be made to take for ever.
_MOST_STEPS = 20_000
_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "boolean"),
    ((int, float), "number"),
    (str, "string"),
    (list, "array"),
    (Mapping, "object"),
    (object, "null"),
)
# Of JSON's types; each whole number is a number.
_ALL = frozenset(kind for _, kind in _KINDS)
Json = dict[str, Any]
_PREFIX = "#/$defs/"
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs")
_ONE = ("items", "additionalProperties")
_MOST_ROUNDS = 16
_NESTING = frozenset({"object", "array"})
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


class Comparison:
    """Compares schemas whose references are to definitions of ``root``, in no more than so many steps in all."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _MOST_STEPS

    def are_disjoint(self, options: Sequence[Any]) -> bool:
        """Whether no value matches two of ``options``, as far as types and the constants of properties tell."""
        pairs = ((first, second) for index, first in enumerate(options) for second in options[:index])
        return all(self._disjoint(first, second, _MAX_DEPTH) for first, second in pairs)

    def _disjoint(self, first: Any, second: Any, depth: int) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        if first is False or second is False:
            return True
        if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
            return False
        first, second = resolved(first, self._root), resolved(second, self._root)
        kinds = self._kinds(first, depth), self._kinds(second, depth)
        if not kinds[0] & kinds[1]:
            return True
        constants = _constants(first), _constants(second)
        if constants[0] is not None and constants[1] is not None:
            self._left -= len(constants[0]) * len(constants[1])
            return self._left >= 0 and not any(_equal(one, other) for one in constants[0] for other in constants[1])
        if not depth or not (kinds[0] == kinds[1] == {"object"}):
            return False
        properties = _named(first), _named(second)
        required = {*first.get("required", ()), *second.get("required", ())}
        shared = properties[0].keys() & properties[1].keys() & required
        return any(self._disjoint(properties[0][name], properties[1][name], depth - 1) for name in sorted(shared))

    def _kinds(self, schema: Any, depth: int) -> frozenset[str]:
        """Return the types of the values that may match ``schema``, and maybe more."""
        self._left -= 1
        if not isinstance(schema, Mapping) or self._left < 0:
            return _ALL
        schema = resolved(schema, self._root)
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            return frozenset("number" if kind == "integer" else kind for kind in kinds)
        values = _constants(schema)
        if values is not None:
            return frozenset(map(_kind_of, values))
        options = schema.get("anyOf", ()) if depth else ()
        return frozenset[str]().union(*(self._kinds(option, depth - 1) for option in options)) if options else _ALL


def _kind_of(value: Any) -> str:
    return next(kind for known, kind in _KINDS if isinstance(value, known))


def _constants(schema: Schema) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _equal(one: Any, other: Any) -> bool:
    # In JSON, true is no number.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _named(schema: Schema) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def without_endless(root: Json) -> Json | bool:
    """Return ``root``, which `plain_schema` made, with false in place of references to what never ends.

    A grammar would have a dead end there.
    """
    definitions = root.get("$defs", {})
    ending = set[str]()
    # What refers comes before what it refers to, mostly, so that few rounds do.
    for _ in range(_MOST_ROUNDS):
        known = len(ending)
        for name in reversed(definitions):
            if name not in ending and _ends(definitions[name], ending):
                ending.add(name)
        if len(ending) == known:
            endless = frozenset(f"{_PREFIX}{name}" for name in definitions.keys() - ending)
            return _replaced(root, endless) if endless else root
    return root


def _ends(schema: Json | bool, ending: set[str]) -> bool:
    """Whether a finite value matches ``schema``, if one matches each of ``ending``. It looks at nesting only."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(_PREFIX) not in ending:
        return False
    for key in ("anyOf", "oneOf"):
        if key in schema and not any(_ends(option, ending) for option in schema[key]):
            return False
    if not all(_ends(part, ending) for part in schema.get("allOf", ())):
        return False
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else {*kinds}
    if not kinds or kinds - _NESTING:
        return True
    return ("object" in kinds and _object_ends(schema, ending)) or ("array" in kinds and _array_ends(schema, ending))


def _object_ends(schema: Json, ending: set[str]) -> bool:
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    others, required = schema.get("additionalProperties", True), schema.get("required", ())
    if schema.get("minProperties", 0) > len(required):
        known = (*properties.values(), *patterns.values(), others)
        if not any(_ends(each, ending) for each in known):
            return False
    # A pattern may have the name.
    unnamed = True if patterns else others
    return all(_ends(properties.get(name, unnamed), ending) for name in required)


def _array_ends(schema: Json, ending: set[str]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    more = least <= len(first) or _ends(schema.get("items", True), ending)
    return more and all(_ends(part, ending) for part in first[:least])


def _replaced(schema: Json | bool, endless: frozenset[str]) -> Json | bool:
    if isinstance(schema, bool):
        return schema
    if schema.get("$ref") in endless:
        return False
    found: Json = {}
    for key, value in schema.items():
        if key in _LISTED:
            found[key] = [_replaced(inner, endless) for inner in value]
        elif key in _NAMED:
            found[key] = {
                name: _replaced(inner, endless)
                for name, inner in value.items()
                if key != "$defs" or f"{_PREFIX}{name}" not in endless
            }
        else:
            found[key] = _replaced(value, endless) if key in _ONE else value
    return {key: value for key, value in found.items() if key != "$defs" or value}


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

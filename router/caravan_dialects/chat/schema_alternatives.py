"""A schema as alternatives that have neither references nor combinators: what a value may be, one thing at a time."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from caravan_dialects.chat.argument_types import Schema, json_types, may_match, parts_of, target_of, types_of
from caravan_dialects.chat.schema_references import UnsupportedSchemaError

# Each alternative is a rule of a grammar.
_MAX_ALTERNATIVES = 64
_MAX_DEPTH = 32
# How deep in objects the property may be that tells two of them apart.
_MAX_TOLD_DEPTH = 2
_LEAST = frozenset({"minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"})
_MOST = frozenset({"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"})
_UNLESS_TRUE = frozenset({"uniqueItems"})
_TEXT_BOUNDS = frozenset({"minLength", "maxLength", "pattern", "format"})
_NUMBER_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
# What a schema can say of values of each type. All other words constrain nothing, or are refused.
_SAYS = {
    "string": _TEXT_BOUNDS,
    "integer": _NUMBER_BOUNDS,
    "number": _NUMBER_BOUNDS,
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "object": frozenset({
        "properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties",
    }),
}  # fmt: skip
_KEPT = frozenset({"type", "enum", "const"}).union(*_SAYS.values())
# Words that no rule of a grammar here can keep to.
_REFUSED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "propertyNames", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
})  # fmt: skip


def alternatives(schema: Any, root: Schema) -> list[Schema]:
    """Return schemas of which a value of ``schema`` matches one; none if no value can match.

    Raises UnsupportedSchemaError.
    """
    found = [part for one in _Flattening(root).of(schema, _MAX_DEPTH) if (part := _checked(one)) is not None]
    return list({msgspec.json.encode(one): one for one in found}.values())


class _Flattening:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _MAX_ALTERNATIVES * _MAX_DEPTH

    def of(self, schema: Any, depth: int) -> list[Schema]:
        self._left -= 1
        if not depth or self._left < 0:
            raise UnsupportedSchemaError("it is nested too deeply, or refers to itself")
        if not isinstance(schema, Mapping):
            return [] if schema is False else [{}]
        if refused := sorted(key for key in _REFUSED & schema.keys() if not _says_nothing(key, schema[key])):
            raise UnsupportedSchemaError(f"`{refused[0]}` cannot be enforced in the syntax of this model's calls")
        found = [_own(schema)]
        if isinstance(reference := schema.get("$ref"), str):
            target = target_of(reference, self._root)
            if target is None:
                raise UnsupportedSchemaError(f"the reference {reference!r} leads nowhere")
            found = _joined(found, self.of(target, depth - 1))
        for part in parts_of(schema, "allOf"):
            found = _joined(found, self.of(part, depth - 1))
        if options := parts_of(schema, "anyOf"):
            found = _joined(found, [one for option in options for one in self.of(option, depth - 1)])
        if options := parts_of(schema, "oneOf"):
            each = [self.of(option, depth - 1) for option in options]
            _check_exclusive([_joined(found, option) for option in each], self._root)
            found = _joined(found, [one for option in each for one in option])
        return found


def _says_nothing(key: str, value: Any) -> bool:
    return value in (True, {}) or (key == "propertyNames" and value == {"type": "string"})


def _own(schema: Schema) -> Schema:
    own = {key: value for key, value in schema.items() if key in _KEPT}
    if "const" in own:
        value = own.pop("const")
        own["enum"] = [value for one in [value] if "enum" not in own or _is_among(one, own["enum"])]
    kind = own.get("type")
    if isinstance(kind, str):
        own["type"] = [kind]
    elif "type" in own and not isinstance(kind, list):
        del own["type"]
    return own


def _joined(first: Sequence[Schema], second: Sequence[Schema]) -> list[Schema]:
    """Return schemas for what matches one of ``first`` and one of ``second``."""
    if len(first) * len(second) > _MAX_ALTERNATIVES:
        raise UnsupportedSchemaError(f"it has more than {_MAX_ALTERNATIVES} alternatives")
    return [joined for one, other in product(first, second) if (joined := _both(one, other)) is not None]


def _both(one: Schema, other: Schema) -> Schema | None:
    """Return a schema for what matches ``one`` and ``other``; None if nothing does."""
    if not one or not other:
        return one or other
    result: dict[str, Any] = {**one, **other}
    for key in one.keys() & other.keys():
        if key not in ("properties", "additionalProperties") and one[key] != other[key]:
            result[key] = _join_of(key)(one[key], other[key])
    for key in ("type", "enum"):
        if key in one and key in other and not result[key]:
            return None
    if "properties" in result:
        names = [*dict.fromkeys([*named(one), *named(other)])]
        result["properties"] = {name: _all_of(property_of(one, name), property_of(other, name)) for name in names}
    if "additionalProperties" in one and "additionalProperties" in other:
        result["additionalProperties"] = _all_of(one["additionalProperties"], other["additionalProperties"])
    if one.get("patternProperties") != other.get("patternProperties"):
        # Which other properties may be there is not known any more, so that only the named ones are written.
        result.pop("patternProperties", None)
        result["additionalProperties"] = False
    return result


def _join_of(key: str) -> Callable[[Any, Any], Any]:
    joins: dict[str, Callable[[Any, Any], Any]] = {
        "type": _types_of_both,
        "enum": lambda one, other: [value for value in one if _is_among(value, other)],
        "required": lambda one, other: [*dict.fromkeys([*one, *other])],
        "items": _all_of,
        **dict.fromkeys(_LEAST, max),
        **dict.fromkeys(_MOST, min),
        **dict.fromkeys(_UNLESS_TRUE, lambda one, other: one or other),
        "patternProperties": lambda one, _: one,
    }
    if key not in joins:
        raise UnsupportedSchemaError(f"two values of `{key}` cannot be joined")
    return joins[key]


def _types_of_both(one: Sequence[str], other: Sequence[str]) -> list[str]:
    both = [kind for kind in one if kind in other]
    whole = ("integer" in one and "number" in other) or ("integer" in other and "number" in one)
    return [*both, *(["integer"] if whole and not {"integer", "number"} & {*both} else [])]


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or one == {} or one == other:
        return other
    if other is True or other == {}:
        return one
    parts = [part for schema in (one, other) for part in (schema["allOf"] if [*schema] == ["allOf"] else [schema])]
    return {"allOf": [part for at, part in enumerate(parts) if part not in parts[:at]]}


def _is_among(value: Any, values: Any) -> bool:
    return any(
        one == value and (one is True) == (value is True) and (one is False) == (value is False) for one in values
    )


def named(schema: Schema) -> Schema:
    """Return the schemas of the named properties."""
    return properties if isinstance(properties := schema.get("properties"), Mapping) else {}


def property_of(schema: Schema, name: str) -> Any:
    """Return the schema of the property ``name`` of ``schema``, which has no combinators; True if it says nothing.

    Raises UnsupportedSchemaError.
    """
    found = [properties[name]] if name in (properties := named(schema)) else []
    for pattern, inner in (schema.get("patternProperties") or {}).items():
        matches = may_match(pattern, name)
        if matches is None:
            raise UnsupportedSchemaError(f"whether the pattern {pattern!r} matches the name `{name}` is not known")
        found += [inner] if matches else []
    if not found:
        return schema.get("additionalProperties", True)
    result = found[0]
    for inner in found[1:]:
        result = _all_of(result, inner)
    return result


def required_of(schema: Schema) -> list[str]:
    """Return the names of the properties that must be there."""
    required = schema.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def members_of(schema: Schema) -> list[tuple[str, Any, bool]]:
    """Return the properties to write: the name, the schema, whether it must be there. Raises UnsupportedSchemaError."""
    required = dict.fromkeys(required_of(schema))
    names = dict.fromkeys([*named(schema), *required])
    found = [(name, property_of(schema, name), name in required) for name in names]
    return [(name, inner, needed) for name, inner, needed in found if needed or inner is not False]


def _checked(schema: Schema) -> Schema | None:
    """Return ``schema`` with only those values of its ``enum`` that match the rest; None if no value matches."""
    if any(needed and inner is False for _, inner, needed in members_of(schema)):
        schema = {**schema, "type": [kind for kind in kinds_of(schema) if kind != "object"]}
        if not schema["type"]:
            return None
    if "enum" not in schema:
        return schema
    values = [value for value in schema["enum"] if _fits(value, schema)]
    return {"enum": values} if values else None


def kinds_of(schema: Schema) -> frozenset[str]:
    """Return the types of an alternative."""
    return types_of(schema, None)


def _fits(value: Any, schema: Schema) -> bool:
    kinds = json_types(value)
    if "type" in schema and not kinds & {*schema["type"]}:
        return False
    others = schema.keys() - {"type", "enum"}
    if isinstance(value, str) and others & _TEXT_BOUNDS:
        return _text_fits(value, schema)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number_fits(value, schema)
    if isinstance(value, list | dict) and others:
        raise UnsupportedSchemaError("`enum` cannot be joined with " + ", ".join(f"`{key}`" for key in sorted(others)))
    return True


def _text_fits(value: str, schema: Schema) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    if "pattern" not in schema:
        return True
    matches = may_match(schema["pattern"], value)
    if matches is None:
        raise UnsupportedSchemaError("`enum` cannot be joined with a `pattern` like this")
    return matches


def _number_fits(value: float, schema: Schema) -> bool:
    least, most = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if "multipleOf" in schema and value % schema["multipleOf"]:
        return False
    fits = (least is None or value >= least) and (most is None or value <= most)
    return fits and (above is None or value > above) and (below is None or value < below)


def _check_exclusive(options: Sequence[Sequence[Schema]], root: Schema) -> None:
    """Raise UnsupportedSchemaError if what is written for one of ``options`` could match another."""
    for at, option in enumerate(options):
        for others in (*options[:at], *options[at + 1 :]):
            if not all(_never_is(one, other, root, _MAX_TOLD_DEPTH) for one in option for other in others):
                raise UnsupportedSchemaError("parts of `oneOf` may match the same value: use `anyOf`")


def _never_is(one: Schema, other: Schema, root: Schema, depth: int) -> bool:
    """Whether nothing that is written for ``one`` matches ``other``."""
    if _both(one, other) is None or not _overlap(kinds_of(one), kinds_of(other)):
        return True
    if "enum" in one:
        return not any(
            _fits(value, other) and ("enum" not in other or _is_among(value, other["enum"])) for value in one["enum"]
        )
    if not depth or kinds_of(one) & kinds_of(other) != {"object"}:
        return False
    writes = {name for name, _, _ in members_of(one)}
    if further_of(one) is None and {*required_of(other)} - writes:
        return True
    return any(_never_both(property_of(one, name), property_of(other, name), root, depth) for name in required_of(one))


def _never_both(one: Any, other: Any, root: Schema, depth: int) -> bool:
    try:
        first, second = alternatives(one, root), alternatives(other, root)
    except UnsupportedSchemaError:
        return False
    return all(_never_is(a, b, root, depth - 1) for a in first for b in second)


def further_of(schema: Schema) -> tuple[str, Any] | None:
    """Return the pattern of the names of further properties that are written, "" for any, and their schema.

    None if there are none. A weak model could invent others without end: only an object that names none has them.
    """
    patterns = schema.get("patternProperties") or {}
    if named(schema):
        return None
    if len(patterns) > 1:
        raise UnsupportedSchemaError("several `patternProperties` cannot be enforced in the syntax of this model")
    pattern, inner = next(iter(patterns.items()), ("", schema.get("additionalProperties", True)))
    return None if inner is False else (pattern, True if inner == {} else inner)


def only(kind: str, schema: Schema) -> Schema:
    """Return what ``schema``, an alternative, says of values of the type ``kind``."""
    return {"type": [kind], **{key: value for key, value in schema.items() if key in _SAYS[kind]}}


def is_plain(schema: Schema) -> bool:
    """Whether an alternative says nothing but the type."""
    return not schema.keys() - {"type"}


def _overlap(one: frozenset[str], other: frozenset[str]) -> bool:
    return bool(one & other) or ("number" in one and "integer" in other) or ("integer" in one and "number" in other)

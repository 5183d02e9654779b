"""The names and the number of properties in schemas, as a grammar can enforce them."""

from collections.abc import Iterable, Mapping
from typing import Any

from caravan_dialects.chat.finite_pattern import finite_texts
from caravan_dialects.chat.schema_problem import Path, UnsupportedSchemaError

Json = dict[str, Any]

# A pattern that matches no more names is written as these.
_MOST_NAMES = 64
_LENGTHS = frozenset({"minLength", "maxLength"})
_COUNTS = frozenset({"minProperties", "maxProperties"})


def with_allowed_names(plain: Json, names: Json | bool, path: Path) -> Json:
    """Return ``plain`` such that all names of properties match the schema ``names``.

    Both are in the form of `plain_schema`. Raises UnsupportedSchemaError.
    """
    if isinstance(names, bool):
        names = {} if names else {"enum": []}
    rules = names.keys() - {"type"}
    kinds = names.get("type", "string")
    if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        allowed: Iterable[Any] | None = ()
    elif not rules:
        return plain
    elif rules == {"const"}:
        allowed = (names["const"],)
    elif rules == {"enum"} and isinstance(names["enum"], list):
        allowed = names["enum"]
    else:
        allowed = finite_texts(names["pattern"], _MOST_NAMES) if rules == {"pattern"} else None
    if allowed is not None and "patternProperties" not in plain:
        return _only(plain, dict.fromkeys(name for name in allowed if isinstance(name, str)))
    if plain.keys() & {"properties", "patternProperties"} or not (rules == {"pattern"} or rules <= _LENGTHS):
        raise UnsupportedSchemaError("it cannot be enforced", (*path, "propertyNames"))
    pattern = names.get("pattern", f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$")
    return {
        **plain,
        "patternProperties": {pattern: plain.get("additionalProperties", {})},
        "additionalProperties": False,
    }


def _only(plain: Json, names: Mapping[str, None]) -> Json:
    known = plain.get("properties", {})
    properties = {name: schema for name, schema in known.items() if name in names}
    others = {name: plain.get("additionalProperties", {}) for name in names if name not in known}
    return {**plain, "properties": properties | others, "additionalProperties": False}


def with_listed_names(plain: Json, path: Path) -> Json:
    """Return ``plain`` with properties in place of patterns that match few names.

    llguidance lets a name that matches a pattern occur twice, and has a dead end where all such names are taken.
    """
    patterns = plain.get("patternProperties", {})
    if len(patterns) > _MOST_NAMES:
        return plain
    found = {pattern: finite_texts(pattern, _MOST_NAMES) for pattern in patterns}
    listed = {pattern: names for pattern, names in found.items() if names is not None}
    known = plain.get("properties", {})
    plain = _with_counts(plain, None if len(listed) < len(found) else {*known}.union(*listed.values()), path)
    properties = dict(known)
    for pattern, names in listed.items():
        # llguidance counts properties only if all that are named are required.
        if not _COUNTS & plain.keys() or names <= known.keys():
            for name in sorted(names):
                properties[name] = _both(properties.get(name, {}), patterns[pattern])
            patterns = {other: schema for other, schema in patterns.items() if other != pattern}
    if patterns == plain.get("patternProperties", {}):
        return plain
    rest = {"patternProperties": patterns} if patterns else {}
    others = {key: value for key, value in plain.items() if key != "patternProperties"}
    return {**others, "properties": properties, **rest}


def _with_counts(plain: Json, names: set[str] | None, path: Path) -> Json:
    """Leave out bounds that always hold. ``names``: of all properties there may be; None if they are not known."""
    required = {*plain.get("required", ())}
    left = dict(plain)
    if left.get("minProperties", 0) <= len(required):
        left.pop("minProperties", None)
    if names is None or plain.get("additionalProperties") is not False:
        return left
    if left.get("minProperties", 0) > len(names):
        raise UnsupportedSchemaError(f"there are only {len(names)} properties", (*path, "minProperties"))
    if left.get("minProperties") == len(names):
        del left["minProperties"]
        left["required"] = sorted(required | names)
    if left.get("maxProperties", 0) >= len(names):
        left.pop("maxProperties", None)
    return left


def _both(one: Any, other: Any) -> Any:
    if one == {} or other is False:
        return other
    return one if other in ({}, one) or one is False else {"allOf": [one, other]}

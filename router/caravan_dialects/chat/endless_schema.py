"""Finds the definitions that no finite value matches, such as one that is no more than a reference to itself."""

from typing import Any

Json = dict[str, Any]

_PREFIX = "#/$defs/"
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs")
_ONE = ("items", "additionalProperties")
_MOST_ROUNDS = 16
_NESTING = frozenset({"object", "array"})


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
        if key in _LISTS:
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

"""Finds out whether no value matches two schemas, so that one of several is any of several."""

from collections.abc import Mapping, Sequence
from typing import Any

from caravan_dialects.chat.argument_types import Schema, resolved

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
        properties = _properties(first), _properties(second)
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


def _properties(schema: Schema) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}

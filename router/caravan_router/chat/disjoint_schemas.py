"""Finds out whether no value matches two schemas, so that one of several is any of several."""

from collections.abc import Mapping, Sequence
from typing import Any

from caravan_router.chat.argument_types import Schema, resolved, types_of

_MAX_DEPTH = 4


def are_disjoint(options: Sequence[Any], root: Schema) -> bool:
    """Whether no value matches two of ``options``, as far as types and the constants of properties tell.

    ``root``: has the definitions to which they refer.
    """
    pairs = ((first, second) for index, first in enumerate(options) for second in options[:index])
    return all(_disjoint(first, second, root, _MAX_DEPTH) for first, second in pairs)


def _disjoint(first: Any, second: Any, root: Schema, depth: int) -> bool:
    if first is False or second is False:
        return True
    if not (isinstance(first, Mapping) and isinstance(second, Mapping)):
        return False
    first, second = resolved(first, root), resolved(second, root)
    if not _types(first, root) & _types(second, root):
        return True
    constants = _constants(first), _constants(second)
    if constants[0] is not None and constants[1] is not None:
        return not any(_equal(one, other) for one in constants[0] for other in constants[1])
    if not depth or not (types_of(first, root) == types_of(second, root) == {"object"}):
        return False
    properties = _properties(first), _properties(second)
    shared = properties[0].keys() & properties[1].keys() & {*first.get("required", ()), *second.get("required", ())}
    return any(_disjoint(properties[0][name], properties[1][name], root, depth - 1) for name in shared)


def _types(schema: Schema, root: Schema) -> frozenset[str]:
    found = types_of(schema, root)
    return found | {"integer"} if "number" in found else found


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

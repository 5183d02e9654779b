"""Makes a body fit its type: without fields that the type does not have, and with whole numbers as integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect

from caravan_router.api.generation.marks import EXACT

# Names beyond these are ignored without a word: a client may send any number of them.
_MOST_IGNORED = 64
# Beyond it, a number with a decimal point has no neighbour that differs by 1.
_MOST_WHOLE = 2.0**63


@dataclass(slots=True)
class Fitting:
    """Fits one body to a type. ``drops``: whether unknown fields are dropped. ``changed``: whether anything was.

    ``ignored``: the paths of the dropped fields that were not null.
    """

    drops: bool
    changed: bool = False
    ignored: list[str] = field(default_factory=list)

    def fit(self, value: Any, kind: inspect.Type, path: str) -> Any:
        """Return ``value``, which stands at ``path`` of a body, so that it fits ``kind`` as far as can be mended."""
        match kind:
            case inspect.Metadata(extra=extra):
                if self.drops and extra and EXACT in extra:
                    exactly = Fitting(drops=False)
                    fitted = exactly.fit(value, kind.type, path)
                    self.changed |= exactly.changed
                    return fitted
                return self.fit(value, kind.type, path)
            case inspect.UnionType():
                return self._fit_union(value, kind.types, path)
            case inspect.IntType() if type(value) is float and value.is_integer() and abs(value) < _MOST_WHOLE:
                self.changed = True
                return int(value)
            case inspect.RawType():
                return msgspec.Raw(msgspec.json.encode(value))
            case inspect.StructType() if isinstance(value, dict):
                return self._fit_struct(value, kind, path)
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item) if isinstance(value, list):
                return self._fit_items(value, [item] * len(value), path)
            case inspect.TupleType(item_types=items) if isinstance(value, list) and len(value) == len(items):
                return self._fit_items(value, items, path)
            case inspect.DictType(value_type=of) if isinstance(value, dict) and not isinstance(of, inspect.AnyType):
                return {name: self.fit(one, of, _under(path, name)) for name, one in value.items()}
            case _:
                return value

    def _fit_union(self, value: Any, kinds: Sequence[inspect.Type], path: str) -> Any:
        if isinstance(value, float) and any(isinstance(kind, inspect.FloatType) for kind in kinds):
            return value
        for kind in kinds:
            if _is_meant(value, kind):
                return self.fit(value, kind, path)
        return value

    def _fit_items(self, values: Sequence[Any], kinds: Sequence[inspect.Type], path: str) -> list[Any]:
        return [
            self.fit(value, kind, f"{path}[{place}]")
            for place, (value, kind) in enumerate(zip(values, kinds, strict=True))
        ]

    def _fit_struct(self, value: Mapping[str, Any], kind: inspect.StructType, path: str) -> dict[str, Any]:
        known = {one.encode_name: one.type for one in kind.fields}
        fitted = {}
        for name, one in value.items():
            if name in known:
                fitted[name] = self.fit(one, known[name], _under(path, name))
            elif name == kind.tag_field or not self.drops:
                fitted[name] = one
            else:
                self.changed = True
                if one is not None and len(self.ignored) < _MOST_IGNORED:
                    self.ignored.append(_under(path, name))
        return fitted


def _is_meant(value: Any, kind: inspect.Type) -> bool:
    """Whether ``kind`` is the one of a union that ``value`` belongs to."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    match value:
        case float():
            return isinstance(kind, inspect.IntType)
        case list():
            return isinstance(kind, inspect.ListType | inspect.VarTupleType | inspect.TupleType)
        case dict():
            if isinstance(kind, inspect.StructType):
                return kind.tag_field is None or value.get(kind.tag_field) == kind.tag
            return isinstance(kind, inspect.DictType)
        case _:
            return False


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

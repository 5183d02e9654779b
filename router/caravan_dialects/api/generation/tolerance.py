"""Makes a body fit its type: without fields that the type does not have, and with whole numbers as integers.

A field whose name is in camel case may also be written with underscores, as in Protobuf's JSON.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import inspect

from caravan_dialects.api.generation.marks import EXACT

# Names beyond these are ignored without a word: a client may send any number of them.
_MOST_IGNORED = 64
# Beyond it, a number with a decimal point has no neighbour that differs by 1.
_MOST_WHOLE = 2.0**63


@dataclass(slots=True)
class Fitting:
    """What is done to one body. ``drops``: whether unknown fields are dropped. ``changed``: whether anything was.

    ``ignored``: the paths of the dropped fields that were not null. ``path``: where the work is.
    """

    drops: bool
    path: list[str]
    changed: bool = False
    ignored: list[str] = field(default_factory=list)

    def ignore(self, name: str, value: object) -> None:
        """Note that the field ``name`` of the present object is dropped."""
        self.changed = True
        if value is not None and len(self.ignored) < _MOST_IGNORED:
            self.ignored.append("".join([*self.path, f".{name}"]).removeprefix("."))


class Shape(Protocol):
    """A type as far as its values may have to be mended."""

    def fit(self, value: Any, fitting: Fitting) -> Any:
        """Return ``value``, whose lists and objects are changed in place, so that it fits as far as can be mended."""
        ...


class _Whole:
    def fit(self, value: Any, fitting: Fitting) -> Any:
        if type(value) is not float or not value.is_integer() or abs(value) >= _MOST_WHOLE:
            return value
        fitting.changed = True
        return int(value)


class _Raw:
    def fit(self, value: Any, _fitting: Fitting) -> Any:
        return msgspec.Raw(msgspec.json.encode(value))


@dataclass(slots=True)
class _Struct:
    """``shapes``: of all fields by their names; None for those whose values fit or do not.

    ``aliases``: the names of fields by those that they have with underscores.
    """

    tag_field: str | None
    shapes: dict[str, Shape | None]
    aliases: dict[str, str] = field(default_factory=dict)

    def fit(self, value: Any, fitting: Fitting) -> Any:
        if type(value) is not dict:
            return value
        for alias in self.aliases.keys() & value.keys():
            # A field that is there under both names counts as it is called.
            value.setdefault(self.aliases[alias], value.pop(alias))
            fitting.changed = True
        unknown = []
        for name, one in value.items():
            if name in self.shapes:
                if (shape := self.shapes[name]) is not None:
                    _fit_within(value, name, shape, fitting, f".{name}")
            elif name != self.tag_field and fitting.drops:
                unknown.append(name)
                fitting.ignore(name, one)
        for name in unknown:
            del value[name]
        return value


@dataclass(slots=True)
class _Items:
    """A list of values of one shape."""

    of: Shape

    def fit(self, value: Any, fitting: Fitting) -> Any:
        if type(value) is list:
            for place in range(len(value)):
                _fit_within(value, place, self.of, fitting, f"[{place}]")
        return value


@dataclass(slots=True)
class _Places:
    """A list whose length is fixed, with a shape for each place."""

    shapes: Sequence[Shape | None]

    def fit(self, value: Any, fitting: Fitting) -> Any:
        if type(value) is list:
            for place, shape in enumerate(self.shapes[: len(value)]):
                if shape is not None:
                    _fit_within(value, place, shape, fitting, f"[{place}]")
        return value


@dataclass(slots=True)
class _Map:
    """An object whose names are not known, with values of one shape."""

    of: Shape

    def fit(self, value: Any, fitting: Fitting) -> Any:
        if type(value) is dict:
            for name in value:
                _fit_within(value, name, self.of, fitting, f".{name}")
        return value


@dataclass(slots=True)
class _Choice:
    """One of several shapes. An object that says its type has the shape of that ``tag``."""

    by_type: Mapping[type, Shape]
    tag_field: str | None
    by_tag: Mapping[object, Shape]

    def fit(self, value: Any, fitting: Fitting) -> Any:
        shape = self.by_type.get(type(value))
        if self.tag_field is not None and type(value) is dict:
            tag = value.get(self.tag_field)
            shape = self.by_tag.get(tag) if isinstance(tag, str | int) else None
        return value if shape is None else shape.fit(value, fitting)


@dataclass(slots=True)
class _Exact:
    """A value that has no unknown fields, whatever is tolerated elsewhere."""

    of: Shape

    def fit(self, value: Any, fitting: Fitting) -> Any:
        drops, fitting.drops = fitting.drops, False
        try:
            return self.of.fit(value, fitting)
        finally:
            fitting.drops = drops


def _fit_within(holder: Any, key: str | int, shape: Shape, fitting: Fitting, step: str) -> None:
    fitting.path.append(step)
    before = holder[key]
    fitted = shape.fit(before, fitting)
    if fitted is not before:
        holder[key] = fitted
    fitting.path.pop()


def shape_of(kind: type[msgspec.Struct]) -> Shape:
    """Return the shape of a body."""
    shape = _shape(inspect.type_info(kind), {})
    assert shape is not None
    return shape


def _shape(kind: inspect.Type, made: dict[type, _Struct]) -> Shape | None:
    """Return the shape of ``kind``, None if nothing can be mended. ``made``: shapes of structs so far."""
    match kind:
        case inspect.Metadata():
            inner = _shape(kind.type, made)
            return _Exact(inner) if inner is not None and EXACT in (kind.extra or {}) else inner
        case inspect.UnionType():
            return _choice(kind.types, made)
        case inspect.IntType():
            return _Whole()
        case inspect.RawType():
            return _Raw()
        case inspect.StructType():
            if kind.cls not in made:
                made[kind.cls] = struct = _Struct(kind.tag_field, {})
                struct.shapes |= {one.encode_name: _shape(one.type, made) for one in kind.fields}
                struct.aliases |= {one.name: one.encode_name for one in kind.fields if _is_camel(one)}
            return made[kind.cls]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            inner = _shape(item, made)
            return None if inner is None else _Items(inner)
        case inspect.TupleType(item_types=items):
            return _Places([_shape(item, made) for item in items])
        case inspect.DictType(value_type=of):
            inner = _shape(of, made)
            return None if inner is None else _Map(inner)
        case _:
            return None


def _is_camel(one: inspect.Field) -> bool:
    """Whether the name of a field in JSON is its name in camel case, and differs from it."""
    first, *rest = one.name.split("_")
    return bool(rest) and one.encode_name == first + "".join(map(str.capitalize, rest))


def _choice(kinds: Sequence[inspect.Type], made: dict[type, _Struct]) -> Shape | None:
    """Return the shape of a union, in which at most one type has lists, and one has objects unless these have tags."""
    by_type: dict[type, Shape] = {}
    by_tag: dict[object, Shape] = {}
    tag_field = None
    for kind in kinds:
        shape = _shape(kind, made)
        if isinstance(kind, inspect.StructType) and kind.tag_field is not None and shape is not None:
            tag_field = kind.tag_field
            by_tag[kind.tag] = shape
        elif isinstance(shape, _Whole):
            by_type[float] = shape
        elif isinstance(shape, _Items | _Places):
            by_type[list] = shape
        elif shape is not None:
            by_type[dict] = shape
    if any(isinstance(kind, inspect.FloatType) for kind in kinds):
        by_type.pop(float, None)
    return _Choice(by_type, tag_field, by_tag) if by_type or by_tag else None

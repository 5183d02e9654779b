"""Reads bodies of clients that send more than is known here: see decision 18.

A body is made to fit its type: without fields that the type does not have, and with whole numbers as integers. A field
whose name is in camel case may also be written with underscores, as in Protobuf's JSON. Marked fields of the body are
found: those without effect, of which a reply tells, and those that are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import inspect

from caravan_dialects.api.body import decode, mismatch
from caravan_dialects.api.errors import BodyMismatchError, MalformedBodyError
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.generation.schema import ADVICE, EXACT, NEUTRAL, NO_EFFECT

# Names beyond these are ignored without a word: a client may send any number of them.
_MOST_IGNORED = 64
# Beyond it, a number with a decimal point has no neighbour that differs by 1.
_MOST_WHOLE = 2.0**63
T = TypeVar("T", bound=msgspec.Struct)
_ANYTHING = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class _Mark:
    """A marked field.

    ``neutral``: the values with which it changes nothing; None if it never changes anything. ``advice``: what else may
    be done about others.
    """

    attribute: str
    name: str
    neutral: Sequence[Any] | None
    advice: str


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks of a type, and those of its fields, as attribute and name, in whose values there are more marks."""

    own: Sequence[_Mark]
    deeper: Sequence[tuple[str, str]]


class _Place(NamedTuple):
    """Where a struct is: at ``number`` of the list ``name`` of another one, or its field ``name`` if that is None."""

    within: "_Place | str"
    name: str
    number: int | None


def without_effect(body: msgspec.Struct, path: str = "") -> list[str]:
    """Return the paths of fields of ``body`` that are set and have no effect. ``path``: where it stands itself.

    Raises ValidationError for a field that is refused.
    """
    found: list[str] = []
    _look(body, path, found)
    return found


def _look(body: msgspec.Struct, place: _Place | str, found: list[str]) -> None:
    # This runs for each message of each conversation: paths are made when they are needed.
    marks = _marks_of(type(body))
    for mark in marks.own:
        value = getattr(body, mark.attribute)
        if value is None:
            continue
        path = _path(place, mark.name)
        if mark.neutral is None:
            found.append(path)
        elif not any(value == neutral for neutral in mark.neutral):
            raise unsupported_field_error(path, mark.advice, value)
    for attribute, name in marks.deeper:
        value = getattr(body, attribute)
        if type(value) is list:
            for index, one in enumerate(value):
                if isinstance(one, msgspec.Struct):
                    _look(one, _Place(place, name, index), found)
        elif isinstance(value, msgspec.Struct):
            _look(value, _Place(place, name, None), found)


def _path(place: _Place | str, name: str) -> str:
    if isinstance(place, str):
        return f"{place}.{name}" if place else name
    index = "" if place.number is None else f"[{place.number}]"
    return f"{_path(place.within, place.name)}{index}.{name}"


@cache
def _marks_of(kind: type[msgspec.Struct]) -> _Marks:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    own, deeper = [], []
    for one in found.fields:
        extra = one.type.extra or {} if isinstance(one.type, inspect.Metadata) else {}
        if NO_EFFECT in extra or NEUTRAL in extra:
            neutral = extra.get(NEUTRAL)
            off = "null" if neutral is None or len(neutral) != 1 else msgspec.json.encode(neutral[0]).decode()
            own.append(_Mark(one.name, one.encode_name, neutral, extra.get(ADVICE, f"set it to {off}")))
        elif _has_marks(one.type, frozenset({kind})):
            deeper.append((one.name, one.encode_name))
    return _Marks(own, deeper)


def _has_marks(kind: inspect.Type, seen: frozenset[type]) -> bool:
    """Whether values of ``kind`` are structs, or lists of them, that have marks. ``seen``: types that are looked at."""
    match kind:
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            return _has_marks(inner, seen)
        case inspect.UnionType():
            return any(_has_marks(one, seen) for one in kind.types)
        case inspect.StructType():
            if kind.cls in seen:
                return False
            return any(
                (isinstance(field.type, inspect.Metadata) and {NO_EFFECT, NEUTRAL} & (field.type.extra or {}).keys())
                or _has_marks(field.type, seen | {kind.cls})
                for field in kind.fields
            )
        case _:
            return False


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
            return _choice([*_members(kind)], made)
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


def _members(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types of a union, and of unions within it that have a description of their own."""
    match kind:
        case inspect.UnionType():
            for one in kind.types:
                yield from _members(one)
        case inspect.Metadata(type=inspect.UnionType() as inner) if EXACT not in (kind.extra or {}):
            yield from _members(inner)
        case _:
            yield kind


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


class BodyReader(Generic[T]):
    """Reads bodies of one type. The usual one takes a single pass; one that does not fit is read again and mended."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    @cached_property
    def _shape(self) -> Shape:
        """Made for the first body that needs it: a router has some sixty readers."""
        return shape_of(self._kind)

    def read(self, data: bytes | msgspec.Raw, *, exact: bool = False, inside: str = "") -> tuple[T, list[str]]:
        """Return a body, or the part of one that is ``inside`` a field; and the paths of fields that were ignored.

        ``exact``: unknown fields are refused. Whole numbers may be written with a decimal point in any case.
        Raises MalformedBodyError, BodyMismatchError, ValidationError.
        """
        unknown: list[str] = []
        # A type that allows unknown fields does not tell which there are.
        if exact or self._kind.__struct_config__.forbid_unknown_fields:
            try:
                body = decode(data, self._decoder, inside)
            except BodyMismatchError as error:
                body, unknown = self._mended(data, inside, Fitting(not exact, [inside]), error)
        else:
            body, unknown = self._mended(data, inside, Fitting(True, [inside]), None)
        return body, [*unknown, *without_effect(body, inside)]

    def _mended(
        self, data: bytes | msgspec.Raw, inside: str, fitting: Fitting, refused: BodyMismatchError | None
    ) -> tuple[T, list[str]]:
        """Read ``data`` with what can be mended. ``refused``: why it does not fit as it is."""
        try:
            given = decode(data, _ANYTHING, inside)
        except BodyMismatchError:
            # The first reading knows the field.
            raise refused or BodyMismatchError("", "a number is out of range") from None
        try:
            # The paths are those of the whole body, the messages of `convert` are completed by `mismatch`.
            fitted = self._shape.fit(given, fitting)
            if refused is not None and not fitting.changed:
                raise refused
            return msgspec.convert(fitted, self._kind), fitting.ignored
        except msgspec.ValidationError as error:
            raise mismatch(error, inside) from error
        except RecursionError as error:
            raise MalformedBodyError("it is nested too deeply") from error

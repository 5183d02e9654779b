"""Translates between the messages of `caravan_proto.messages` and protobuf, by the names of their fields.

A field has the name that it has in the .proto file, or its `Codec` says which, and its type says the rest: None is a
field that is absent, an enum has the names of the values, a dataclass is a message with a codec of its own.
"""

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

K = TypeVar("K")
M = TypeVar("M", bound=Message)


class MalformedError(ValueError):
    """A protobuf message is no message of its kind; the text says why."""


class Part(Protocol):
    """How one field of a dataclass is kept in a protobuf message."""

    def put(self, value: Any, into: dict[str, Any]) -> None:
        """Add ``value`` to the arguments with which the protobuf message is made."""
        ...

    def take(self, message: Any) -> Any:
        """Return the value that ``message`` has. Raises MalformedError."""
        ...


class Columns:
    """Pairs, in two repeated fields."""

    def __init__(self, first: str, second: str) -> None:
        self._first, self._second = first, second

    def put(self, value: Sequence[tuple[Any, Any]], into: dict[str, Any]) -> None:
        """See `Part`."""
        into[self._first], into[self._second] = [one for one, _ in value], [other for _, other in value]

    def take(self, message: Any) -> tuple[tuple[Any, Any], ...]:
        """See `Part`."""
        first, second = getattr(message, self._first), getattr(message, self._second)
        if len(first) != len(second):
            raise MalformedError(
                f"there must be one of {self._second} for each of {self._first}. Given: {len(second)} and {len(first)}"
            )
        return tuple(zip(first, second, strict=True))


class Pairs:
    """Pairs, in a repeated message of two fields."""

    def __init__(self, wire: str, message: Callable[..., Message], first: str, second: str) -> None:
        self._wire, self._message, self._first, self._second = wire, message, first, second

    def put(self, value: Sequence[tuple[Any, Any]], into: dict[str, Any]) -> None:
        """See `Part`."""
        into[self._wire] = [self._message(**{self._first: one, self._second: other}) for one, other in value]

    def take(self, message: Any) -> tuple[tuple[Any, Any], ...]:
        """See `Part`."""
        return tuple((getattr(one, self._first), getattr(one, self._second)) for one in getattr(message, self._wire))


class Nanoseconds:
    """Seconds, which are nanoseconds on the wire."""

    def __init__(self, wire: str) -> None:
        self._wire = wire

    def put(self, value: float, into: dict[str, Any]) -> None:
        """See `Part`."""
        into[self._wire] = round(value * 1e9)

    def take(self, message: Any) -> float:
        """See `Part`."""
        seconds: float = getattr(message, self._wire) / 1e9
        return seconds


class Switch:
    """A flag, as one of two values of an enum. Any value but ``off`` means true."""

    def __init__(self, wire: str, *, on: int, off: int) -> None:
        self._wire, self._on, self._off = wire, on, off

    def put(self, value: bool, into: dict[str, Any]) -> None:
        """See `Part`."""
        into[self._wire] = self._on if value else self._off

    def take(self, message: Any) -> bool:
        """See `Part`."""
        return bool(getattr(message, self._wire) != self._off)


class Named:
    """A member of an enum, as the value of the same name. Values without a member are read as ``unknown``, if given."""

    def __init__(self, wire: str, message: type[Message], kind: type[Enum], *unknown: Enum | None) -> None:
        described: Any = message.DESCRIPTOR.fields_by_name[wire].enum_type
        # The names on the wire begin with that of the enum.
        prefix = described.values[0].name.removesuffix("UNSPECIFIED")
        self._numbers = {member: described.values_by_name[prefix + member.name].number for member in kind}
        self._members = {number: member for member, number in self._numbers.items()}
        self._wire, self._unknown = wire, unknown

    def put(self, value: Enum | None, into: dict[str, Any]) -> None:
        """See `Part`."""
        into[self._wire] = None if value is None else self._numbers[value]

    def take(self, message: Any) -> Enum | None:
        """See `Part`."""
        number = getattr(message, self._wire)
        if number not in self._members and not self._unknown:
            raise MalformedError(f"{self._wire} is {number}, which means nothing here")
        return self._members.get(number, *self._unknown)


class Codec(Generic[K, M]):
    """Translates between one dataclass and one kind of protobuf message.

    ``named``: for each field whose name is another on the wire, that name, or its `Part`. ``left_out``: fields that do
    not travel, and have a default. ``inner``: the codecs of dataclasses in its fields.
    """

    def __init__(
        self,
        kind: type[K],
        message: type[M],
        *,
        named: Mapping[str, str | Part] = types.MappingProxyType({}),
        left_out: Sequence[str] = (),
        inner: Sequence["Codec[Any, Any]"] = (),
    ) -> None:
        self.kind, self.message = kind, message
        hints = typing.get_type_hints(kind)
        codecs = {codec.kind: codec for codec in inner}
        parts: list[tuple[str, Part]] = []
        for one in fields(typing.cast("Any", kind)):
            if one.name not in left_out:
                part = named.get(one.name, one.name)
                parts.append(
                    (one.name, _part(part, hints[one.name], message, codecs) if isinstance(part, str) else part)
                )
        # Most fields are as they are on one side or on both. All of them are read at once.
        self._same_out = _Together(
            {name: part.wire for name, part in parts if isinstance(part, _Field) and part.is_same_out}
        )
        self._same_back = _Together(
            {part.wire: name for name, part in parts if isinstance(part, _Field) and part.is_same_back}
        )
        self._out = [(name, part) for name, part in parts if not (isinstance(part, _Field) and part.is_same_out)]
        self._back = [(name, part) for name, part in parts if not (isinstance(part, _Field) and part.is_same_back)]

    def encode(self, value: K) -> M:
        """Return the protobuf message."""
        into = self._same_out.of(value)
        for name, part in self._out:
            part.put(getattr(value, name), into)
        return self.message(**into)

    def decode(self, message: M, **left_out: Any) -> K:
        """Return the dataclass; ``left_out`` has fields that do not travel. Raises MalformedError."""
        taken = self._same_back.of(message)
        for name, part in self._back:
            taken[name] = part.take(message)
        return self.kind(**taken, **left_out)


class _Together:
    """Reads attributes into a dictionary, in which they have other names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._others = tuple(names.values())
        # With one name or none, attrgetter would return no tuple.
        self._get = attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]

    def of(self, value: Any) -> dict[str, Any]:
        """Return the values by their other names."""
        return dict(zip(self._others, self._get(value), strict=True))


class _Field:
    """One field of the same meaning. ``out`` and ``back`` translate its value; None if nothing is to translate."""

    def __init__(
        self, wire: str, out: Callable[[Any], Any] | None, back: Callable[[Any], Any] | None, *, optional: bool
    ) -> None:
        self.wire = wire
        self._out, self._back, self._optional = out, back, optional
        self.is_same_out = out is None
        self.is_same_back = back is None and not optional

    def put(self, value: Any, into: dict[str, Any]) -> None:
        into[self.wire] = value if self._out is None or value is None else self._out(value)

    def take(self, message: Any) -> Any:
        if self._optional and not message.HasField(self.wire):
            return None
        value = getattr(message, self.wire)
        return value if self._back is None else self._back(value)


def _part(wire: str, hint: Any, message: type[Message], codecs: Mapping[Any, Codec[Any, Any]]) -> Part:
    """Return how a field of the type ``hint`` is kept in the field ``wire``."""
    assert wire in message.DESCRIPTOR.fields_by_name, f"{message.DESCRIPTOR.name} has no field {wire}"
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    origin = typing.get_origin(hint)
    if origin in {tuple, frozenset, Sequence}:
        if kinds[0] not in codecs:
            return _Field(wire, None, frozenset if origin is frozenset else tuple, optional=False)
        one = codecs[kinds[0]]
        return _Field(
            wire,
            lambda values: [one.encode(value) for value in values],
            lambda values: tuple([one.decode(value) for value in values]),
            optional=False,
        )
    if origin is Mapping:
        return _Field(wire, None, dict, optional=False)
    optional = origin in {typing.Union, types.UnionType}
    kind = kinds[0] if optional else hint
    if is_dataclass(kind):
        codec = codecs[kind]
        return _Field(wire, codec.encode, codec.decode, optional=optional)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Named(wire, message, kind, *([None] if optional else []))
    return _Field(wire, None, None, optional=optional)

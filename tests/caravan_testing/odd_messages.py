"""Messages of protobuf with one odd value each, for every field that a message and the messages in it have."""

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_DEEPEST = 5
_MANY = 20_000
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 99, -1),
}
_OTHERS: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -1.0, 1e-45, 3e38, math.inf, -math.inf, math.nan),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e-320, 1e308, math.inf, -math.inf, math.nan),
}
_TEXTS = ("", "x", "\0\r\n", "é" * 100_000)


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _TEXTS if field.type == FieldDescriptor.TYPE_STRING else tuple(text.encode() for text in _TEXTS)
    return _INTEGERS.get(field.cpp_type) or _OTHERS[field.cpp_type]


def odd_messages(base: Message) -> Iterator[tuple[str, Message]]:
    """Yield the names and contents of messages like ``base``, each with another value of one field."""
    for path in _paths(base.DESCRIPTOR):
        for name, message in _odd(base, path):
            yield f"{'.'.join(field.name for field in path)}: {name}", message


def _paths(message: Any, above: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    if len(above) >= _DEEPEST:
        return
    for field in message.fields:
        yield (*above, field)
        if field.message_type is not None:
            yield from _paths(field.message_type, (*above, field))


def _odd(base: Message, path: tuple[FieldDescriptor, ...]) -> Iterator[tuple[str, Message]]:
    def copied() -> tuple[Message, Message]:
        whole = type(base)()
        whole.CopyFrom(base)
        part = whole
        for field in path[:-1]:
            inner = getattr(part, field.name)
            # A message of a list is its first one, which is made if there is none.
            part = (inner[0] if len(inner) else inner.add()) if field.is_repeated else inner
        return whole, part

    last = path[-1]
    whole, part = copied()
    part.ClearField(last.name)
    yield "absent", whole
    if last.message_type is not None:
        whole, part = copied()
        inner = getattr(part, last.name)
        if last.is_repeated:
            for _ in range(_MANY):
                inner.add()
        else:
            inner.SetInParent()
        yield "empty", whole
        return
    for value in _values(last):
        whole, part = copied()
        if last.is_repeated:
            getattr(part, last.name).append(value)
            yield f"one more {value!r:.20}", whole
            if not isinstance(value, (str, bytes)) or len(value) < 100:
                whole, part = copied()
                getattr(part, last.name).extend([value] * _MANY)
                yield f"many {value!r:.20}", whole
        else:
            setattr(part, last.name, value)
            yield f"{value!r:.20}", whole

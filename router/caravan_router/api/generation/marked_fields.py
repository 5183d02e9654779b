"""Finds the marked fields of a body: those without effect, of which a reply tells, and those that are refused."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from caravan_router.api.generation.marks import NEUTRAL, NO_EFFECT
from caravan_router.api.generation.rules import unsupported_field_error


@dataclass(frozen=True, slots=True)
class _Mark:
    """A marked field. ``neutral``: the values with which it changes nothing; None if it never changes anything."""

    attribute: str
    name: str
    neutral: Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class _Marks:
    """The marks of a type, and those of its fields, as attribute and name, in whose values there are more marks."""

    own: Sequence[_Mark]
    deeper: Sequence[tuple[str, str]]


def without_effect(body: msgspec.Struct, path: str = "") -> Iterator[str]:
    """Yield the paths of fields of ``body`` that are set and have no effect. ``path``: where it stands itself.

    Raises ValidationError for a field that is refused.
    """
    marks = _marks_of(type(body))
    for mark in marks.own:
        value = getattr(body, mark.attribute)
        if value is None:
            continue
        where = f"{path}.{mark.name}" if path else mark.name
        if mark.neutral is None:
            yield where
        elif not any(value == neutral for neutral in mark.neutral):
            advice = f"set it to {msgspec.json.encode(mark.neutral[0]).decode()}" if len(mark.neutral) == 1 else None
            raise unsupported_field_error(where, advice or "set it to null", value)
    for attribute, name in marks.deeper:
        value = getattr(body, attribute)
        if value is not None:
            yield from _within(value, f"{path}.{name}" if path else name)


def _within(value: object, path: str) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        yield from without_effect(value, path)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            if isinstance(one, msgspec.Struct):
                yield from without_effect(one, f"{path}[{place}]")


@cache
def _marks_of(kind: type[msgspec.Struct]) -> _Marks:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    own, deeper = [], []
    for field in found.fields:
        extra = field.type.extra or {} if isinstance(field.type, inspect.Metadata) else {}
        if NO_EFFECT in extra or NEUTRAL in extra:
            own.append(_Mark(field.name, field.encode_name, extra.get(NEUTRAL)))
        elif _has_marks(field.type, frozenset({kind})):
            deeper.append((field.name, field.encode_name))
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

"""Finds the marked fields of a body: those without effect, of which a reply tells, and those that are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from caravan_dialects.api.generation.marks import NEUTRAL, NO_EFFECT
from caravan_dialects.api.generation.rules import unsupported_field_error


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
            advice = msgspec.json.encode(mark.neutral[0]).decode() if len(mark.neutral) == 1 else "null"
            raise unsupported_field_error(path, f"set it to {advice}", value)
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

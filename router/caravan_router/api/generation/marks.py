"""Fields that a type marks: those without effect, which a reply tells of, and those that are refused by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import inspect

from caravan_router.api.generation.rules import unsupported_field_error

_NO_EFFECT, _NEUTRAL = "caravan.no_effect", "caravan.neutral"

NoEffect = Annotated[Any, msgspec.Meta(description="Accepted and without effect.", extra={_NO_EFFECT: True})]
Unsupported = Annotated[
    Any,
    msgspec.Meta(
        description="Not supported: accepted only with the value that switches it off.",
        extra={_NEUTRAL: (False, 0, "", [], {})},
    ),
]
SwitchedOff = Annotated[
    Any,
    msgspec.Meta(
        description="Not supported: accepted only with the value that switches it off, which may be -1.",
        extra={_NEUTRAL: (False, 0, "", [], {}, -1)},
    ),
]
UnsupportedNumber = Annotated[
    Any, msgspec.Meta(description="Not supported: accepted only if it is null.", extra={_NEUTRAL: ()})
]
TextOnly = Annotated[
    Any,
    msgspec.Meta(description='Accepted only with `["text"]`, which changes nothing.', extra={_NEUTRAL: (["text"],)}),
]


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
        if _NO_EFFECT in extra or _NEUTRAL in extra:
            own.append(_Mark(field.name, field.encode_name, extra.get(_NEUTRAL)))
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
                (isinstance(field.type, inspect.Metadata) and {_NO_EFFECT, _NEUTRAL} & (field.type.extra or {}).keys())
                or _has_marks(field.type, seen | {kind.cls})
                for field in kind.fields
            )
        case _:
            return False

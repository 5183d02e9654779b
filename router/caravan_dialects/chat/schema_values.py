"""Numbers, and the patterns and formats of strings, in schemas as a grammar can express them.

llguidance reads all numbers as doubles, and overlooks some errors in regular expressions: it drops a backslash at the
end, for one.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum, auto
from typing import Any

from caravan_dialects.chat.schema_references import Path, UnsupportedSchemaError

# Up to here a double has every whole number.
_EXACT = 2**53
# The largest double that llguidance can use as a bound: the last one below 2**63.
_MOST = 2**63 - 1024
_MOST_MULTIPLE = 2**32

Number = int | float
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
# Classes may have classes within.
_CLASS = re.compile(r"\[\^?\]?")
# Those that llguidance knows. JSON Schema has more, which are annotations, as are the inventions of others.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
# Patterns that are found in every text.
_ANY = frozenset({"", ".*", "^", "$", "^.*", ".*$"})


def check_constant(value: Any, path: Path) -> None:
    """Raise UnsupportedSchemaError if a grammar would write other numbers than those in ``value``."""
    waiting: list[tuple[Any, Path]] = [(value, path)]
    while waiting:
        value, path = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(inner, (*path, key)) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(inner, (*path, index)) for index, inner in enumerate(value)]
        elif is_number(value) and abs(value) > _EXACT:
            reason = f"a number must be between -2**53 and 2**53, or be written as a string. Given: {_shown(value)}"
            raise UnsupportedSchemaError(reason, path)


def is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool)


def bounds(schema: Mapping[str, Any], path: Path) -> dict[str, Number]:
    """Return the bounds of ``schema`` in the form of JSON Schema 2020-12.

    A bound that no double is moves to the next double within, so that whatever keeps to it is right.
    """
    lower = _bound(schema, "minimum", "exclusiveMinimum", path)
    upper = _bound({key: _negative(value) for key, value in schema.items()}, "maximum", "exclusiveMaximum", path)
    upper = {key: _negative(value) for key, value in upper.items()}
    if "minimum" in lower and "maximum" in upper and lower["minimum"] > upper["maximum"]:
        raise UnsupportedSchemaError("no number that can be enforced is between its bounds", path)
    found = lower | upper
    for exclusive, inclusive, others in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum")),
    ):
        for other in others:
            if exclusive in found and other in found and _is_misread(found[exclusive], found[other]):
                found[inclusive] = _just_within(found.pop(exclusive), found[other])
    return found


def _is_misread(exclusive: Number, other: Number) -> bool:
    """Whether llguidance would allow the bound ``exclusive``: a whole number less than 1 away from ``other``."""
    return int(exclusive) == exclusive and other != exclusive and abs(other - exclusive) < 1


def _just_within(exclusive: Number, other: Number) -> float:
    return float(Decimal(int(exclusive)) + (Decimal(repr(other)) - int(exclusive)).scaleb(-6))


def check_multiple(value: Any, path: Path) -> None:
    """Raise UnsupportedSchemaError if ``value`` cannot be enforced as a `multipleOf`."""
    if not is_number(value) or value <= 0:
        raise UnsupportedSchemaError(f"it must be a number above 0. Given: {_shown(value)}", path)
    decimal = Decimal(repr(value))
    digits = int(decimal) if decimal == decimal.to_integral_value() else int("".join(map(str, decimal.as_tuple()[1])))
    if digits >= _MOST_MULTIPLE:
        raise UnsupportedSchemaError(f"its digits must be less than 2**32. Given: {_shown(value)}", path)


def _bound(schema: Mapping[str, Any], inclusive: str, exclusive: str, path: Path) -> dict[str, Number]:
    """Return the lower bounds; those of a schema whose numbers have the other sign are the upper ones."""
    least, above = schema.get(inclusive), schema.get(exclusive)
    if above is True and least is not None:
        # So it was in draft 4.
        least, above = None, least
    found = {}
    for key, bound in ((inclusive, least), (exclusive, None if above is False or above is True else above)):
        if bound is None:
            continue
        if not is_number(bound):
            raise UnsupportedSchemaError(f"it must be a number. Given: {_shown(bound)}", (*path, key))
        if abs(bound) < _EXACT:
            found[key] = bound
            continue
        within = _next_double(bound, inclusive=key == inclusive)
        if within > _MOST:
            given = bound if inclusive == "minimum" else -bound
            reason = f"a bound must be between -2**63 and 2**63. Given: {_shown(given)}"
            raise UnsupportedSchemaError(reason, (*path, key))
        found[inclusive] = max(within, -_MOST, found.get(inclusive, -_MOST))
    return found


def _next_double(bound: Number, *, inclusive: bool) -> Number:
    """Return the first double, as a whole number, that is above ``bound``, or if that is allowed, equal to it."""
    try:
        double = float(bound)
    except OverflowError:
        return _MOST + 1 if bound > 0 else -_MOST
    while int(double) < bound or (int(double) == bound and not inclusive):
        double = math.nextafter(double, math.inf)
        if math.isinf(double):
            return _MOST + 1
    return int(double)


def _negative(value: Any) -> Any:
    return -value if is_number(value) else value


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


class _Before(Enum):
    """What precedes a place in an expression."""

    NOTHING = auto()
    ANCHOR = auto()
    ATOM = auto()
    REPEATED = auto()
    LAZY = auto()


def ends_in_escape(pattern: str) -> bool:
    """Whether ``pattern`` ends with a backslash that escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def pattern_problem(pattern: str) -> str | None:
    """Return what is wrong with ``pattern`` in ECMA 262, as far as this module looks, or None."""
    if ends_in_escape(pattern):
        return "the regular expression ends with a backslash that escapes nothing"
    at, before = 0, _Before.NOTHING
    while at < len(pattern):
        character = pattern[at]
        count = _COUNT.match(pattern, at)
        if character in "*+?" or count is not None:
            if before is _Before.REPEATED and character == "?":
                before = _Before.LAZY
            elif before is _Before.ATOM:
                before = _Before.REPEATED
            else:
                return f"the regular expression has nothing to repeat at {at}"
            at = at + 1 if count is None else count.end()
            continue
        before = _Before.ATOM
        match character:
            case "\\":
                at += 2
            case "[":
                at = _behind_class(pattern, at)
            case "(":
                before = _Before.NOTHING
                at += 2 if pattern.startswith("(?", at) else 1
            case "|":
                before = _Before.NOTHING
                at += 1
            case "^" | "$":
                before = _Before.ANCHOR
                at += 1
            case _:
                at += 1
    return None


def _behind_class(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        opening = _CLASS.match(pattern, at)
        if opening is not None:
            depth += 1
            at = opening.end()
        elif pattern[at] == "\\":
            at += 2
        else:
            depth -= int(pattern[at] == "]")
            at += 1
            if not depth:
                break
    return at


def string_rules(schema: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return ``pattern`` and ``format`` of ``schema``, as far as they constrain."""
    found = {}
    if (pattern := schema.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise UnsupportedSchemaError("it must be a regular expression", (*path, "pattern"))
        check_pattern(pattern, (*path, "pattern"))
        if pattern not in _ANY:
            found["pattern"] = pattern
    if (name := schema.get("format")) is not None:
        if not isinstance(name, str):
            raise UnsupportedSchemaError("it must be a string", (*path, "format"))
        if name in _FORMATS:
            found["format"] = name
    return found


def check_pattern(pattern: str, path: Path) -> None:
    """Raise UnsupportedSchemaError for an error in ``pattern`` that llguidance does not find."""
    problem = pattern_problem(pattern)
    if problem is not None:
        raise UnsupportedSchemaError(problem, path)

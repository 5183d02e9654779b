"""Numbers in schemas as a grammar can express them: llguidance reads all as doubles."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from caravan_dialects.chat.schema_problem import Path, UnsupportedSchemaError

# Up to here a double has every whole number.
_EXACT = 2**53
# The largest double that llguidance can use as a bound: the last one below 2**63.
_MOST = 2**63 - 1024
_MOST_MULTIPLE = 2**32

Number = int | float


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

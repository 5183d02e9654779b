"""Range checks that several dialects share. They raise a ValidationError and do not check None."""

import math
from collections.abc import Sequence

from caravan_router.http.generation.rules import (
    CandidatesError,
    EmptyStopError,
    NotStrictlyPositiveError,
    OutOfRangeError,
    StopTooLongError,
    TooManyStopsError,
)
from caravan_router.http.limits import Limits

MAX_TOP_K = 2**31 - 1
# Dividing logits by a smaller temperature overflows float32; the result is greedy anyway.
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0


def check_range(field: str, value: float | None, low: float, high: float) -> None:
    """Require ``low`` <= ``value`` <= ``high``."""
    if value is not None and not low <= value <= high:
        raise OutOfRangeError(field, low, high, value)


def check_positive(field: str, value: float | None) -> None:
    """Require ``value`` > 0."""
    if value is not None and value <= 0:
        raise NotStrictlyPositiveError(field, value)


def check_temperature(field: str, value: float | None, *, zero_allowed: bool) -> None:
    """Require a temperature in range."""
    if value is not None and (value < 0 or (value == 0 and not zero_allowed)):
        raise NotStrictlyPositiveError(field, value)
    check_range(field, value, 0.0, MAX_TEMPERATURE)


def check_repetition_penalty(field: str, value: float | None) -> None:
    """Require a repetition penalty in range."""
    check_positive(field, value)
    check_range(field, value, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


def check_candidates(field: str, count: int, limits: Limits) -> None:
    """Require that ``n`` or ``best_of`` is at least 1 and within the limit."""
    if not 1 <= count <= limits.max_best_of:
        raise CandidatesError(field, limits.max_best_of, count)


def check_stops(stops: Sequence[str], limits: Limits) -> tuple[str, ...]:
    """Return the stop strings. Requires that they are few, short and not empty."""
    if len(stops) > limits.max_stop_sequences:
        raise TooManyStopsError(limits.max_stop_sequences, len(stops))
    for stop in stops:
        if not stop:
            raise EmptyStopError
        size = len(stop.encode())
        if size > limits.max_stop_bytes:
            raise StopTooLongError(limits.max_stop_bytes, size)
    return tuple(stops)


def effective_temperature(temperature: float) -> float:
    """Return ``temperature``, or 0 (greedy) if it is too small to divide by."""
    assert math.isfinite(temperature), temperature
    return temperature if temperature >= GREEDY_TEMPERATURE else 0.0

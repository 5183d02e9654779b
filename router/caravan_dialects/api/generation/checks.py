"""Range checks that several dialects share, and seeds. Checks raise a ValidationError and do not check None."""

import math
import secrets
from collections.abc import Sequence

from caravan_dialects.api.generation.rules import (
    candidates_error,
    empty_stop_error,
    not_strictly_positive_error,
    out_of_range_error,
    stop_too_long_error,
    too_many_stops_error,
)
from caravan_dialects.api.limits import Limits
from caravan_proto.messages.sampling import MAX_SEED, RANGES

# Dividing logits by a smaller temperature overflows float32; the result is greedy anyway.
GREEDY_TEMPERATURE = 1e-5
# Each is looked for in every text. Nobody writes more of them by hand.
MANY_STOPS = 64
# Parameters of which clients learn first that they must be positive.
_POSITIVE = frozenset({"temperature", "repetition_penalty"})
# As a seed, it asks for a random one in every dialect, as in llama-server.
RANDOM_SEED = -1
# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GAMMA = 0x9E3779B97F4A7C15


def check_range(field: str, value: float | None, low: float, high: float) -> None:
    """Require ``low`` <= ``value`` <= ``high``."""
    if value is not None and not low <= value <= high:
        raise out_of_range_error(field, low, high, value)


def check_positive(field: str, value: float | None) -> None:
    """Require ``value`` > 0."""
    if value is not None and value <= 0:
        raise not_strictly_positive_error(field, value)


def check_sampled(name: str, value: float | None, prefix: str = "") -> None:
    """Require a sampling parameter in the range that clients may send. ``prefix`` precedes its name in errors."""
    allowed, field = RANGES[name], prefix + name
    if value is not None and name in _POSITIVE and value <= 0 and value < allowed.low:
        raise not_strictly_positive_error(field, value)
    check_range(field, value, allowed.lowest_sent, allowed.high)


def check_candidates(field: str, count: int, limits: Limits) -> None:
    """Require that ``n`` or ``best_of`` is at least 1 and within the limit."""
    if not 1 <= count <= limits.max_best_of:
        raise candidates_error(field, limits.max_best_of, count)


def check_stops(stops: Sequence[str], limits: Limits, most: int = MANY_STOPS) -> tuple[str, ...]:
    """Return the stop strings. Requires that they are few, short and not empty.

    ``most``: how many there may be if the operator has set no limit.
    """
    most = most if limits.max_stop_sequences is None else limits.max_stop_sequences
    if len(stops) > most:
        raise too_many_stops_error(most, len(stops))
    for stop in stops:
        if not stop:
            raise empty_stop_error()
        size = len(stop.encode())
        if size > limits.max_stop_bytes:
            raise stop_too_long_error(limits.max_stop_bytes, size)
    return tuple(stops)


def effective_temperature(temperature: float) -> float:
    """Return ``temperature``, or 0 (greedy) if it is too small to divide by."""
    assert math.isfinite(temperature), temperature
    return temperature if temperature >= GREEDY_TEMPERATURE else 0.0


def draw_seed() -> int:
    """Return a seed for a request without one."""
    return secrets.randbits(64)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index``: ``seed`` itself for the first, else the ``index``-th output of SplitMix64.

    The first choice thus equals the choice of a request for one, and no two choices share their draws: SplitMix64
    repeats no output within 2**64.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GAMMA) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return mixed ^ (mixed >> 31)

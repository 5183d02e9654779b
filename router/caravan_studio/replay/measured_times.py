"""Step times of a shard, by what its steps took in a recording."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Sizes with the seconds that they take, ascending.
Points = tuple[tuple[int, float], ...]

# Sizes up to this one have a mean of their own, larger ones that of all up to the next power of two.
_EXACT = 32
# Fewer steps do not tell what the context of their prompts costs.
_FEWEST_STEPS = 20


def at_size(points: Points, size: int) -> float:
    """Return the seconds of ``size`` on straight lines through two ``points`` or more, of which the last continues."""
    (left, left_s), (right, right_s) = points[0], points[1]
    for point in points[2:]:
        if size <= right:
            break
        (left, left_s), (right, right_s) = (right, right_s), point
    return left_s + (right_s - left_s) * (size - left) / (right - left)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """``riders`` decoded in it; it computed ``tokens`` of prompts, in ``pairs`` with a token before their chunks."""

    riders: int
    tokens: int
    pairs: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Seconds of a step that decodes, of one with prompts ``alone``, and what prompts ``beside`` decodes add to it.

    Each pair of a prompt token and a token before its chunk adds ``pair_s``. Copying a cell takes ``cell_s``.
    """

    decode: Points
    alone: Points
    beside: Points
    pair_s: float
    cell_s: float

    def seconds(self, sequences: int, prompt_tokens: int = 0, pairs: int = 0) -> float:
        """Return the seconds of a step; see `Times`."""
        if not prompt_tokens:
            return at_size(self.decode, sequences)
        pairs_s = self.pair_s * pairs
        if not sequences:
            return at_size(self.alone, prompt_tokens) + pairs_s
        return at_size(self.decode, sequences) + at_size(self.beside, prompt_tokens) + pairs_s


def measure(steps: Sequence[MeasuredStep], cell_s: float) -> MeasuredTimes:
    """Return the mean times of steps by their sizes. ``cell_s``: seconds to copy a cell."""
    decode = _means(((step.riders, step.seconds) for step in steps if not step.tokens), flat=True)
    prefills = [step for step in steps if step.tokens]
    rests = [step.seconds - (at_size(decode, step.riders) if step.riders else 0.0) for step in prefills]
    pair_s = _seconds_of_pair(prefills, rests)
    plain = [(step, max(0.0, rest - pair_s * step.pairs)) for step, rest in zip(prefills, rests, strict=True)]
    alone = [(step.tokens, rest) for step, rest in plain if not step.riders]
    beside = [(step.tokens, rest) for step, rest in plain if step.riders]
    return MeasuredTimes(
        decode=decode,
        alone=_means(alone or beside, flat=True),
        beside=_means(beside or alone, flat=False),
        pair_s=pair_s,
        cell_s=cell_s,
    )


def _means(sized: Iterable[tuple[int, float]], *, flat: bool) -> Points:
    """Return the mean seconds of sizes. ``flat``: the smallest size takes as long as none would."""
    points: list[tuple[int, float]] = []
    for _, group in itertools.groupby(sorted(one for one in sized if one[0] > 0), key=lambda one: _bucket(one[0])):
        found = list(group)
        size = round(sum(size for size, _ in found) / len(found))
        points.append((size, sum(seconds for _, seconds in found) / len(found)))
    if not points:
        return ((0, 0.0), (1, 0.0))
    return ((0, points[0][1] if flat else 0.0), *points)


def _bucket(size: int) -> int:
    return size if size <= _EXACT else _EXACT + size.bit_length()


def _seconds_of_pair(steps: Sequence[MeasuredStep], rests: Sequence[float]) -> float:
    """Return the seconds of a pair, by least squares over tokens, pairs and a constant; 0 if that tells nothing."""
    count = len(steps)
    if count < _FEWEST_STEPS:
        return 0.0
    tokens = _centred([float(step.tokens) for step in steps])
    pairs = _centred([float(step.pairs) for step in steps])
    seconds = _centred(rests)
    of_tokens, of_pairs, common = _dot(tokens, tokens), _dot(pairs, pairs), _dot(tokens, pairs)
    determinant = of_tokens * of_pairs - common * common
    if determinant <= 1e-9 * of_tokens * of_pairs:
        return 0.0
    return max(0.0, (of_tokens * _dot(pairs, seconds) - common * _dot(tokens, seconds)) / determinant)


def _centred(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))

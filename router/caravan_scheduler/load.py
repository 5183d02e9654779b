"""What comes in: how many requests a second, whether that grows, and what a request takes of a shard."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Arrivals are counted in bins of so many seconds.
_BIN_S = 5.0
# Growth changes by about this part of the rate per second, times the root of the seconds that have passed.
_CHANGE = 3.2e-4
# The first guess: the rate doubles within so many seconds, or falls to nothing.
_FIRST_GROWTH_S = 60.0
_NEWEST_DISPERSION = 1 / 30
# After so many seconds without a request, nothing is known of those to come.
_FORGOTTEN_S = 600.0
# Requests that the means remember, so that a few long prompts move them little.
_REMEMBERED = 512
# Before steps of several numbers of sequences were seen, reading the weights takes as long as so many sequences more.
_WEIGHTS_AS_SEQUENCES = 4.0


@dataclass(slots=True)
class Mean:
    """The mean of the last values, of which new ones weigh more."""

    value: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Learn from ``value``."""
        self._count = min(self._count + 1, _REMEMBERED)
        self.value += (value - self.value) / self._count


class Arrivals:
    """Counts requests by the time at which they come, in seconds on the scheduler's clock, and foresees how many will.

    It is the Kalman filter of a rate with a trend (the local linear trend model; Harvey, "Forecasting, Structural Time
    Series Models and the Kalman Filter", 1989). Counts vary as those of a Poisson process do, or more where they are
    seen to do so, such as in bursts: then each count says less.
    """

    def __init__(self) -> None:
        # When the bin ends in which requests are counted; None before the first request, and after a long pause.
        self._ends_s: float | None = None
        self._count = 0
        # In requests per second, and per second squared; None until the first bin has ended.
        self._rate: float | None = None
        self._growth = 0.0
        # The variance of the rate, the covariance of both, and the variance of the growth.
        self._variance = (0.0, 0.0, 0.0)
        # How many times the variance of a Poisson process the counts have.
        self._dispersion = 1.0

    def note(self, now_s: float) -> None:
        """Count a request."""
        self._move(now_s)
        if self._ends_s is None:
            self._ends_s = now_s + _BIN_S
        self._count += 1

    def expected(self, now_s: float, ahead_s: float) -> float:
        """Return the requests per second to expect in ``ahead_s``, less what may be chance. A fall is not foreseen."""
        self._move(now_s)
        if self._rate is None:
            return 0.0
        rate = max(0.0, self._rate - math.sqrt(self._variance[0]))
        return rate + ahead_s * max(0.0, self._growth - math.sqrt(self._variance[2]))

    def seen(self, now_s: float) -> float:
        """Return the requests per second that come now, as likely too many as too few."""
        self._move(now_s)
        return self._rate or 0.0

    def _move(self, now_s: float) -> None:
        """Learn from the bins that have ended."""
        if self._ends_s is None:
            return
        if now_s - self._ends_s > _FORGOTTEN_S:
            self._ends_s, self._count = None, 0
            self._rate, self._growth, self._dispersion = None, 0.0, 1.0
            return
        while self._ends_s <= now_s:
            self._learn(self._count / _BIN_S)
            self._count = 0
            self._ends_s += _BIN_S

    def _learn(self, seen: float) -> None:
        """Learn that in the bin that has just ended the rate was ``seen``."""
        if self._rate is None:
            self._rate = seen
            self._variance = (seen / _BIN_S, 0.0, (seen / _FIRST_GROWTH_S) ** 2)
            return
        least = 1 / _BIN_S
        change = (max(self._rate, least) * _CHANGE) ** 2 * _BIN_S
        rate_var, covariance, growth_var = self._variance
        expected = self._rate + self._growth * _BIN_S
        rate_var += _BIN_S * (2 * covariance + _BIN_S * (growth_var + change / 3))
        covariance += _BIN_S * (growth_var + change / 2)
        growth_var += change
        error, chance = seen - expected, max(expected, least) / _BIN_S
        all_var = rate_var + chance * max(1.0, self._dispersion)
        self._dispersion += _NEWEST_DISPERSION * (error**2 / (rate_var + chance) - self._dispersion)
        gain, growth_gain = rate_var / all_var, covariance / all_var
        self._rate = max(0.0, expected + gain * error)
        self._growth += growth_gain * error
        if not self._rate:
            self._growth = max(0.0, self._growth)
        self._variance = (
            (1 - gain) * rate_var,
            (1 - gain) * covariance,
            growth_var - growth_gain * covariance,
        )


@dataclass(frozen=True, slots=True)
class DecodeCurve:
    """Numbers of sequences and the seconds in which each of them gets a token, both ascending; one at least."""

    points: Sequence[tuple[float, float]]

    def seconds(self, sequences: float) -> float:
        """Return the seconds for so many sequences: straight lines, of which the last one goes on.

        No step is shorter for fewer than were seen. With one point, reading the weights takes as long as decoding some
        sequences more.
        """
        points = self.points
        place = bisect.bisect_left(points, (sequences, 0.0))
        right, right_s = points[min(place, len(points) - 1)]
        if place == 0:
            return right_s
        left, left_s = points[place - 1]
        if place < len(points):
            return left_s + (right_s - left_s) * (sequences - left) / (right - left)
        slope_s = left_s / (left + _WEIGHTS_AS_SEQUENCES)
        if place > 1:
            before, before_s = points[place - 2]
            slope_s = min((left_s - before_s) / (left - before), left_s / left)
        return left_s + slope_s * (sequences - left)


class DecodeTimes:
    """In how many seconds sequences that only decode get a token each, by how many there are.

    `ShardCosts` follows each shard step by step, and forgets what it has not measured lately. This asks what shards
    take that are fuller or emptier than they are now, so it remembers: there is a mean for each power of two and what
    lies between it and the next.
    """

    def __init__(self) -> None:
        # By the number of bits of the number of sequences, the mean number and the mean seconds.
        self._means: dict[int, tuple[Mean, Mean]] = {}

    def note(self, sequences: int, tokens: int, seconds: float) -> None:
        """Learn from a step of so many ``sequences``, which got ``tokens``: with drafts, more than one each."""
        means = self._means.setdefault(sequences.bit_length(), (Mean(), Mean()))
        means[0].add(sequences)
        means[1].add(seconds * sequences / tokens)

    @property
    def curve(self) -> DecodeCurve | None:
        """What was seen; None before the first step."""
        points: list[tuple[float, float]] = []
        for _, (size, seconds) in sorted(self._means.items()):
            points.append((size.value, max(seconds.value, points[-1][1]) if points else seconds.value))
        return DecodeCurve(points) if points else None


@dataclass(slots=True)
class Load:
    """What comes and what it takes, over all shards of a model.

    ``prompt_tokens`` of a request are those that must be computed when it starts; also the mean of their square.
    ``prompt_cells``: the cells that it does not share then. ``prompt_s`` and ``chunk_tokens``: what a step with chunks
    takes longer than one without, in seconds, and their tokens.
    """

    arrivals: Arrivals = field(default_factory=Arrivals)
    decodes: DecodeTimes = field(default_factory=DecodeTimes)
    prompt_tokens: Mean = field(default_factory=Mean)
    prompt_tokens_squared: Mean = field(default_factory=Mean)
    prompt_cells: Mean = field(default_factory=Mean)
    prompt_s: Mean = field(default_factory=Mean)
    chunk_tokens: Mean = field(default_factory=Mean)

    def note_start(self, prompt_tokens: int, prompt_cells: int) -> None:
        """Learn from a request that starts."""
        self.prompt_tokens.add(prompt_tokens)
        self.prompt_tokens_squared.add(prompt_tokens**2)
        self.prompt_cells.add(prompt_cells)

    def note_chunks(self, tokens: int, seconds: float, *, riders: int) -> None:
        """Learn from a step with chunks of so many ``tokens`` beside so many ``riders``, which decode."""
        curve = self.decodes.curve
        self.chunk_tokens.add(tokens)
        self.prompt_s.add(max(0.0, seconds - (curve.seconds(max(1, riders)) if curve else 0.0)))

    @property
    def prompt_token_s(self) -> float:
        """What a step takes longer for each token of a prompt, in seconds; 0 before the first."""
        return self.prompt_s.value / self.chunk_tokens.value if self.chunk_tokens.value else 0.0

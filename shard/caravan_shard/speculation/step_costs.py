"""How long a step takes by its number of tokens, learnt from the steps, and how many draft tokens pay for that.

A draft token makes the step longer for all its sequences, and gives one of them more tokens. The tokens per second of
all together would favour one sequence at the expense of the others. So the sum over the sequences of the logarithm of
their tokens per second is maximised (proportional fairness): with sequences that are alike, it is the same.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import log

# The weight of one step in what is known of its size. The first ones weigh more.
_NEWEST = 0.1
# A size that was not measured in this many steps follows the others completely.
_STALE_AFTER = 8
# Number of measurements of a size before other sizes are compared with it.
_ENOUGH = 4
# A disturbed step counts as at most this many times the expected one.
_MOST_SURPRISE = 2.0
# The guess for sizes that were not measured: reading the weights takes as long as computing this many tokens, as on a
# GPU. On CPUs a step or two show that it takes less; nothing would show that too high a guess is wrong.
_WEIGHTS_AS_TOKENS = 64.0
# A size that was measured less than often enough is forgotten after so many steps: it may have been disturbed.
_FORGOTTEN_AFTER = 256


class StepCosts:
    """Seconds of a step by its number of tokens.

    A table and no formula: kernels compute tokens in groups, so a step over nine tokens may take twice the time of one
    over eight.
    """

    __slots__ = ("_counts", "_last", "_seconds", "_sizes", "_steps")

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        # The number of the last step of each size.
        self._last: dict[int, int] = {}
        self._steps = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step over ``tokens``."""
        self._steps += 1
        self._last[tokens] = self._steps
        if self._steps % _FORGOTTEN_AFTER == 0:
            self._forget()
        if tokens not in self._seconds:
            most = _MOST_SURPRISE * self.seconds(tokens) if self._sizes else seconds
            self._sizes.insert(bisect_left(self._sizes, tokens), tokens)
            self._seconds[tokens], self._counts[tokens] = min(seconds, most), 1
            return
        expected = self._seconds[tokens]
        ratio = min(seconds / expected, _MOST_SURPRISE)
        # Contexts grow and the machine has other work: that concerns all sizes alike.
        for size, last in self._last.items():
            staleness = min(1.0, (self._steps - last) / _STALE_AFTER)
            self._seconds[size] *= 1 + _NEWEST * (ratio - 1) * staleness
        self._counts[tokens] += 1
        self._seconds[tokens] = expected * (1 + max(_NEWEST, 1 / self._counts[tokens]) * (ratio - 1))

    def knows(self, tokens: int) -> bool:
        """Whether steps over ``tokens`` were measured often enough to compare others with them."""
        return self._counts.get(tokens, 0) >= _ENOUGH

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds of a step over ``tokens``: a guess where none was measured, 1 without any."""
        known = self._seconds.get(tokens)
        if known is not None:
            return known
        if not self._sizes:
            return _WEIGHTS_AS_TOKENS + tokens
        place = bisect_left(self._sizes, tokens)
        if 0 < place < len(self._sizes):
            low, high = self._sizes[place - 1], self._sizes[place]
            share = (tokens - low) / (high - low)
            return self._seconds[low] + share * (self._seconds[high] - self._seconds[low])
        near = self._sizes[min(place, len(self._sizes) - 1)]
        return self._seconds[near] * (_WEIGHTS_AS_TOKENS + tokens) / (_WEIGHTS_AS_TOKENS + near)

    def _forget(self) -> None:
        """Forget what was seldom measured, and not lately."""
        oldest = self._steps - _FORGOTTEN_AFTER
        for size in [size for size in self._sizes if not self.knows(size) and self._last[size] < oldest]:
            self._sizes.remove(size)
            del self._seconds[size], self._counts[size], self._last[size]


def gains(survivals: Sequence[float]) -> list[float]:
    """Return by how much each further draft token raises the logarithm of the expected tokens of its sequence."""
    expected = 1.0
    found = []
    for survival in survivals:
        found.append(log(1.0 + survival / expected))
        expected += survival
    return found


def best_lengths(survivals: Sequence[Sequence[float]], most: int, costs: StepCosts) -> list[int]:
    """Return the best number of draft tokens of each sequence, together at most ``most``.

    ``survivals``: for each sequence of the step, what `SequenceAcceptance.survivals` returns; empty without a draft.
    """
    # Gains fall from token to token of a draft, so the best tokens of all are the first ones of each.
    slots = sorted(
        ((gain, index) for index, row in enumerate(survivals) for gain in gains(row)), key=lambda slot: -slot[0]
    )[:most]
    count = best_count([gain for gain, _ in slots], len(survivals), costs)
    lengths = [0] * len(survivals)
    for _, index in slots[:count]:
        lengths[index] += 1
    return lengths


def best_count(slots: Sequence[float], sequences: int, costs: StepCosts, tokens_each: int = 1) -> int:
    """Return how many of the first ``slots`` are worth the time that they take.

    Each slot has ``tokens_each`` tokens and this gain. All numbers are tried: times do not grow evenly.
    """
    base = log(costs.seconds(sequences))
    best, best_value, value = 0, 0.0, 0.0
    for count, gain in enumerate(slots, 1):
        value += gain
        total = value - sequences * (log(costs.seconds(sequences + count * tokens_each)) - base)
        if total > best_value:
            best, best_value = count, total
    return best

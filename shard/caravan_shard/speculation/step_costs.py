"""How long a step takes by its number of tokens, learnt from the steps, and how many draft tokens pay for that.

A draft token makes the step longer for all its sequences, and gives one of them more tokens. The tokens per second of
all together would favour one sequence at the expense of the others. So the sum over the sequences of the logarithm of
their tokens per second is maximised (proportional fairness): with sequences that are alike, it is the same.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import inf, log

# The weight of one step in what is known of its size, after the first ones, and of one after which it is not doubted.
_NEWEST = 0.1
_AFTER_DOUBT = 0.5
# A size that was not measured in this many steps follows the others completely.
_STALE_AFTER = 8
# Number of measurements of a size before other sizes are compared with it.
_ENOUGH = 4
# A disturbed step counts as at most this many times the expected one, and the first of its size as so many times.
_MOST_SURPRISE = 1.25
_MOST_FIRST = 2.0
# The guess for sizes that were not measured: reading the weights takes as long as computing this many tokens, as on a
# GPU. On CPUs a step or two show that it takes less; nothing would show that too high a guess is wrong.
_WEIGHTS_AS_TOKENS = 64.0
# A size that was measured less than often enough is forgotten after so many steps: it may have been disturbed. One that
# was measured often enough is doubted after more of them, until it is measured again.
_FORGOTTEN_AFTER = 256
_DOUBTED_AFTER = 1024
# In the best case, the first half of the tokens between two sizes that are known takes this share of the time between
# them: kernels compute tokens in groups, and each group may be a new one.
_BEST_CASE = 0.25


# Returns the seconds of a step over so many tokens.
Seconds = Callable[[int], float]


class StepCosts:
    """Seconds of a step by its number of tokens.

    A table and no formula: kernels compute tokens in groups, so a step over nine tokens may take twice the time of one
    over eight.
    """

    __slots__ = ("_changes", "_counts", "_doubted", "_first", "_last", "_seconds", "_sizes", "_steps", "change_s")

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        # The seconds of the first step of each size that was measured once.
        self._first: dict[int, float] = {}
        self._doubted: set[int] = set()
        # The number of the last step of each size.
        self._last: dict[int, int] = {}
        self._steps = 0
        # How much longer a step takes if the one before had another size, and how often that was measured. Presumably
        # since llama.cpp keeps the graph of the last step.
        self.change_s = 0.0
        self._changes = 0

    def observe_change(self, tokens: int, seconds: float) -> None:
        """Learn from a step over ``tokens`` after one of another size."""
        if not self.knows(tokens):
            self.observe(tokens, max(seconds - self.change_s, seconds / 2))
            return
        expected = self._seconds[tokens]
        extra = max(0.0, seconds - expected)
        self._changes += 1
        if self._changes <= _ENOUGH:
            self.change_s = extra if self._changes == 1 else min(extra, self.change_s)
            return
        most = self.change_s + (_MOST_SURPRISE - 1) * expected
        self.change_s += _NEWEST * (min(extra, most) - self.change_s)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step over ``tokens``, as the one before."""
        self._steps += 1
        self._last[tokens] = self._steps
        if self._steps % _FORGOTTEN_AFTER == 0:
            self._forget()
        count = self._counts.get(tokens, 0) + 1
        self._counts[tokens] = count
        if count == 1:
            self._first[tokens] = seconds
            self._seconds[tokens] = min(seconds, _MOST_FIRST * self.seconds(tokens)) if self._sizes else seconds
            insort(self._sizes, tokens)
            return
        if count <= _ENOUGH:
            # What disturbs a step makes it longer. A size that seems too slow is not chosen, so not corrected either.
            self._seconds[tokens] = min(seconds, self._first.pop(tokens, self._seconds[tokens]))
            return
        ratio = min(seconds / self._seconds[tokens], _MOST_SURPRISE)
        # Contexts grow and the machine has other work: that concerns all sizes alike.
        for size, last in self._last.items():
            staleness = min(1.0, (self._steps - last) / _STALE_AFTER)
            self._seconds[size] *= 1 + _NEWEST * (ratio - 1) * staleness
        self._seconds[tokens] *= 1 + (_AFTER_DOUBT if tokens in self._doubted else _NEWEST) * (ratio - 1)
        self._doubted.discard(tokens)

    def knows(self, tokens: int) -> bool:
        """Whether steps over ``tokens`` were measured often enough to compare others with them."""
        return self._counts.get(tokens, 0) >= _ENOUGH and tokens not in self._doubted

    def bounds(self) -> "Bounds":
        """Return the bounds of what is seldom measured, until the next step is observed."""
        return Bounds(self, [size for size in self._sizes if self.knows(size)])

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
        return _guess(tokens, near, self._seconds[near])

    def _forget(self) -> None:
        """Forget what was seldom measured, and not lately. Doubt what was not measured for long."""
        for size in self._sizes.copy():
            unused = self._steps - self._last[size]
            if self._counts[size] < _ENOUGH and unused > _FORGOTTEN_AFTER:
                self._sizes.remove(size)
                del self._seconds[size], self._counts[size], self._last[size]
                self._first.pop(size, None)
            elif unused > _DOUBTED_AFTER:
                self._doubted.add(size)


class Bounds:
    """Bounds of the seconds of a step by its number of tokens, where few steps were measured.

    What seems too slow is not chosen, so it is not measured again either: without ``best``, a disturbed step would
    decide.
    """

    __slots__ = ("_costs", "_known", "_rising")

    def __init__(self, costs: StepCosts, known: Sequence[int]) -> None:
        """``known``: sizes that were measured often enough, ascending."""
        self._costs = costs
        self._known = known
        # Those that take less than all larger ones. A kernel may compute four tokens in less time than two or three, so
        # a size that takes longer than a larger one says nothing of those between them.
        self._rising: list[int] = []
        least_s = inf
        for size in reversed(known):
            if (seconds := costs.seconds(size)) < least_s:
                least_s = seconds
                self._rising.insert(0, size)

    def best(self, tokens: int) -> float:
        """Return the seconds of a step over ``tokens`` in the best case; the expected ones of a size that is known."""
        expected = self._costs.seconds(tokens)
        place = bisect_left(self._rising, tokens)
        if not place or self._costs.knows(tokens):
            return expected
        below = self._rising[place - 1]
        below_s = self._costs.seconds(below)
        if place == len(self._rising):
            hope_s = _guess(tokens, below, below_s)
        else:
            above = self._rising[place]
            share = 2 * (tokens - below) / (above - below)
            share = _BEST_CASE * share if share < 1 else _BEST_CASE + (1 - _BEST_CASE) * (share - 1)
            hope_s = below_s + share * (self._costs.seconds(above) - below_s)
        return min(expected, hope_s)

    def worst(self, tokens: int) -> float:
        """Return the seconds of a step over ``tokens`` in the worst case; the expected ones of a size that is known."""
        expected = self._costs.seconds(tokens)
        if not self._known or self._costs.knows(tokens):
            return expected
        place = bisect_left(self._known, tokens)
        if place < len(self._known):
            return max(expected, self._costs.seconds(self._known[place]))
        most = self._known[-1]
        return max(expected, self._costs.seconds(most) * tokens / most)


def _guess(tokens: int, near: int, near_s: float) -> float:
    """Return the seconds of a step over ``tokens`` where one over ``near`` took ``near_s``."""
    return near_s * (_WEIGHTS_AS_TOKENS + tokens) / (_WEIGHTS_AS_TOKENS + near)


def gains(survivals: Sequence[float]) -> list[float]:
    """Return by how much each further draft token raises the logarithm of the expected tokens of its sequence."""
    expected = 1.0
    found = []
    for survival in survivals:
        found.append(log(1.0 + survival / expected))
        expected += survival
    return found


def best_lengths(survivals: Sequence[Sequence[float]], most: int, seconds: Seconds) -> list[int]:
    """Return the best number of draft tokens of each sequence, together at most ``most``.

    ``survivals``: for each sequence of the step, what `SequenceAcceptance.survivals` returns; empty without a draft.
    """
    # Gains fall from token to token of a draft, so the best tokens of all are the first ones of each.
    slots = sorted(
        ((gain, index) for index, row in enumerate(survivals) for gain in gains(row)), key=lambda slot: -slot[0]
    )[:most]
    count = best_count([gain for gain, _ in slots], len(survivals), seconds)
    lengths = [0] * len(survivals)
    for _, index in slots[:count]:
        lengths[index] += 1
    return lengths


def best_count(slots: Sequence[float], sequences: int, seconds: Seconds, tokens_each: int = 1) -> int:
    """Return how many of the first ``slots`` are worth the time that they take.

    Each slot has ``tokens_each`` tokens and this gain. All numbers are tried: times do not grow evenly.
    """
    base = log(seconds(sequences))
    best, best_value, value = 0, 0.0, 0.0
    for count, gain in enumerate(slots, 1):
        value += gain
        total = value - sequences * (log(seconds(sequences + count * tokens_each)) - base)
        if total > best_value:
            best, best_value = count, total
    return best

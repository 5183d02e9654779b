"""How many draft tokens each sequence of a step has: as many as pay for all of them together.

A draft token makes the step longer for all its sequences, and gives one of them more tokens. The tokens per second of
all together would favour one sequence at the expense of the others. So the sum over the sequences of the logarithm of
their tokens per second is maximised (proportional fairness): with sequences that are alike, it is the same.
"""

from collections.abc import Sequence
from math import log

from caravan_shard.speculation.step_costs import StepCosts


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

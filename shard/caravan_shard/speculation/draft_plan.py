"""How long drafts of a model are worth being, where the model takes time as well: the sum that `step_costs` describes.

Each sequence has a length of its own, since a token that is probably wrong makes the steps of both models longer.
"""

from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

from caravan_shard.speculation.step_costs import Seconds


class Draftee(NamedTuple):
    """A sequence that a model may draft for.

    ``gains``: by how much each token of its draft raises the logarithm of its expected tokens, less for each further
    one but maybe the first. ``read``: how many tokens the model reads in front of the first one, in each step; 1 where
    a step drafts blocks.
    """

    gains: Sequence[float]
    read: int


class DraftPlan(NamedTuple):
    """The lengths of drafts, and what they are worth: the sum over all sequences of the gained logarithm."""

    lengths: list[int]
    value: float


class DraftCosts(NamedTuple):
    """Seconds of steps of the model, and of the one that drafts, whose steps have ``at_once`` tokens of each draft."""

    steps: Seconds
    drafting: Seconds
    at_once: int = 1


def best_drafts(draftees: Sequence[Draftee], sequences: int, most: int, costs: DraftCosts) -> DraftPlan:
    """Return the best lengths of drafts for some of the ``sequences`` of a step, together at most ``most``."""
    order = []
    for index, one in enumerate(draftees):
        least = inf
        for place, gain in enumerate(one.gains):
            # The first tokens of a draft come first.
            least = min(least, gain)
            order.append((-least, index, place))
    order.sort()
    base = log(costs.steps(sequences))
    sizes: list[int] = []
    pass_s: list[float] = []
    best, best_value, value, drafting_s = 0, 0.0, 0.0, 0.0
    for count, (_, index, place) in enumerate(order[:most], 1):
        value += draftees[index].gains[place]
        number, behind = divmod(place, costs.at_once)
        if number == len(sizes):
            sizes.append(0)
            pass_s.append(0.0)
        if not behind:
            sizes[number] += 1 if place else draftees[index].read
            seconds = costs.drafting(sizes[number])
            drafting_s += seconds - pass_s[number]
            pass_s[number] = seconds
        total = value - sequences * (log(costs.steps(sequences + count) + drafting_s) - base)
        if total > best_value:
            best, best_value = count, total
    lengths = [0] * len(draftees)
    for _, index, _ in order[:best]:
        lengths[index] += 1
    return DraftPlan(lengths, best_value)


def best_equal_drafts(draftees: Sequence[Draftee], sequences: int, most: int, costs: DraftCosts) -> DraftPlan:
    """Return the best length of drafts that all ``draftees`` have, as `best_drafts`."""
    base = log(costs.steps(sequences))
    drafting_s = costs.drafting(sum(one.read for one in draftees))
    next_s = costs.drafting(len(draftees))
    best, best_value, value = 0, 0.0, 0.0
    for length in range(1, min(min(len(one.gains) for one in draftees), most // len(draftees)) + 1):
        value += sum(one.gains[length - 1] for one in draftees)
        seconds = costs.steps(sequences + length * len(draftees)) + drafting_s
        total = value - sequences * (log(seconds) - base)
        if total > best_value:
            best, best_value = length, total
        if length % costs.at_once == 0:
            drafting_s += next_s
    return DraftPlan([best] * len(draftees), best_value)

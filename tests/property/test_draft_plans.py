"""Plans of drafts are the best ones, and what is learnt of drafts are probabilities."""

from itertools import accumulate, pairwise, product
from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_shard.speculation.acceptance import Draft, DraftKind, KindAcceptance, SequenceAcceptance
from caravan_shard.speculation.draft_plan import DraftCosts, Draftee, best_drafts, best_equal_drafts
from caravan_shard.speculation.step_costs import StepCosts

PROBABILITIES = st.floats(0.01, 0.99)
SECONDS = st.floats(0.001, 0.1)


@st.composite
def draftees(draw: st.DrawFn) -> list[Draftee]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        survivals = list(accumulate(draw(st.lists(PROBABILITIES, min_size=1, max_size=3)), lambda one, two: one * two))
        expected = list(accumulate(survivals, initial=1.0))
        gains = [log(after / before) for before, after in pairwise(expected)]
        found.append(Draftee(gains, draw(st.integers(1, 4))))
    return found


@st.composite
def costs(draw: st.DrawFn) -> DraftCosts:
    """Return costs that grow, though not evenly."""
    found = []
    for _ in range(2):
        table, seconds = StepCosts(), 0.0
        for tokens in range(1, 20):
            seconds += draw(SECONDS)
            table._sizes.append(tokens)
            table._seconds[tokens] = seconds
        found.append(table.seconds)
    steps, drafting = found
    return DraftCosts(steps, drafting, draw(st.integers(1, 3)))


def value(lengths: list[int], of: list[Draftee], sequences: int, costs: DraftCosts) -> float:
    """Return what drafts of these lengths are worth."""
    seconds = costs.steps(sequences + sum(lengths))
    for place in range(0, max(lengths), costs.at_once):
        going = [one.read if place == 0 else 1 for one, length in zip(of, lengths, strict=True) if length > place]
        seconds += costs.drafting(sum(going))
    gained = sum(sum(one.gains[:length]) for one, length in zip(of, lengths, strict=True))
    return gained - sequences * log(seconds / costs.steps(sequences))


@given(draftees(), costs(), st.integers(0, 3), st.integers(0, 9))
def test_plans_are_worth_what_they_say(of: list[Draftee], known: DraftCosts, others: int, most: int) -> None:
    sequences = len(of) + others
    for find in (best_drafts, best_equal_drafts):
        plan = find(of, sequences, most, known)
        assert sum(plan.lengths) <= most
        assert all(0 <= length <= len(one.gains) for one, length in zip(of, plan.lengths, strict=True))
        if any(plan.lengths):
            assert plan.value == pytest.approx(value(plan.lengths, of, sequences, known))
            assert plan.value > 0


@given(draftees(), costs(), st.integers(0, 3))
def test_no_equal_lengths_are_better(of: list[Draftee], known: DraftCosts, others: int) -> None:
    sequences = len(of) + others
    shortest = min(len(one.gains) for one in of)
    best = max(value([length] * len(of), of, sequences, known) for length in range(1, shortest + 1))
    assert best_equal_drafts(of, sequences, 99, known).value == pytest.approx(max(best, 0.0))


@given(draftees(), st.floats(0.001, 0.1), st.floats(0.0, 0.01))
def test_where_only_tokens_of_the_step_cost_nothing_is_better(of: list[Draftee], base_s: float, token_s: float) -> None:
    """With a step of a fixed and an even cost, and free passes of the head, the tokens that gain most are best."""
    steps, free = StepCosts(), StepCosts()
    for tokens in range(1, 20):
        for table, seconds in ((steps, base_s + token_s * tokens), (free, 1e-12)):
            table._sizes.append(tokens)
            table._seconds[tokens] = seconds
    known = DraftCosts(steps.seconds, free.seconds)
    every = product(*(range(len(one.gains) + 1) for one in of))
    best = max(value(list(lengths), of, len(of), known) for lengths in every if any(lengths))
    assert best_drafts(of, len(of), 99, known).value == pytest.approx(max(best, 0.0), abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from(DraftKind), st.integers(0, 12)), max_size=60))
def test_survivals_are_falling_probabilities(history: list[tuple[DraftKind, int]]) -> None:
    kinds = KindAcceptance()
    acceptance = SequenceAcceptance(kinds)
    for kind, right in history:
        acceptance.watch(Draft(range(10), kind))
        acceptance.observe([*range(min(right, 10)), 99])
    for kind in DraftKind:
        survivals = acceptance.survivals(Draft(range(12), kind))
        assert all(0 < one < 1 for one in survivals)
        assert survivals == sorted(survivals, reverse=True)


@given(st.lists(st.floats(0.05, 0.95), min_size=3, max_size=8), st.integers(0, 99))
def test_the_share_of_each_place_is_learnt(rates: list[float], seed: int) -> None:
    """A sequence that has shown nothing yet may expect it."""
    kinds, chance = KindAcceptance(), Random(seed)
    for _ in range(400):
        for place, rate in enumerate(rates):
            kinds.observe(DraftKind.MODEL, place, is_right=chance.random() < rate)
    survivals = SequenceAcceptance(kinds).survivals(Draft(range(len(rates)), DraftKind.MODEL))
    expected = list(accumulate(rates, lambda one, two: one * two))
    assert survivals == pytest.approx(expected, abs=0.25)

"""Mirostat and adaptive-p: what they keep, what they learn, and that they end where nothing is drawn."""

import math
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.sampling.choice import Choice, choose_token
from caravan_shard.sampling.feedback import Feedback, make_feedback
from caravan_shard.sampling.filters import filter_candidates

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))


def parameters(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, **fields)


def test_mirostat_2_keeps_tokens_up_to_its_surprise_and_learns_from_the_chosen_one() -> None:
    two = parameters(mirostat=2, mirostat_tau=1.05, mirostat_eta=0.5)
    feedback = Feedback(two, 5, None)
    assert feedback.value == pytest.approx(2.1)
    # Of 2.1 bits at most are the first two tokens: 2/3 and 1/3 of what is left.
    assert feedback.draw(LOGITS, 0.99) == 1
    assert feedback.value == pytest.approx(2.1 - 0.5 * (math.log2(3) - 1.05))
    assert Feedback(two, 5, 3.1).draw(LOGITS, 0.99) == 2
    assert Feedback(two, 5, 4.1).draw(LOGITS, 0.99) == 4
    # Nothing is so sure: the likeliest token is left.
    for low in (0.5, -3.0):
        feedback = Feedback(two, 5, low)
        assert feedback.draw(LOGITS, 0.99) == 0
        assert feedback.value == pytest.approx(low + 0.525)


def test_mirostat_1_keeps_as_many_tokens_as_a_zipf_distribution_needs() -> None:
    ranks = np.arange(1, 2_001)
    logits = np.random.default_rng(3).permutation(-1.5 * np.log(ranks)).astype(np.float32)
    one = parameters(mirostat=1, mirostat_tau=4.0)
    for surprise in (0.5, 4.0, 8.0):
        exponent, size = 1.5, 2_000
        share = (1 - size ** (1 - exponent)) / (exponent - 1)
        most = max(1, int((2**surprise / share) ** (1 / exponent)))
        likely = set(np.argsort(-logits)[:most].tolist())
        drawn = {Feedback(one, size, surprise).draw(logits, number) for number in np.linspace(0, 0.9999, 4_000)}
        assert drawn == likely


@pytest.mark.parametrize(
    "logits", [[0.0], [0.0, 0.0, 0.0], [0.0, -900.0], [0.0, -np.inf], list(range(-300, 1))], ids=str
)
@pytest.mark.parametrize("value", [-5.0, 0.0, 3.0, 900.0])
def test_mirostat_draws_from_any_distribution(logits: list[float], value: float) -> None:
    for kind in (1, 2):
        feedback = Feedback(parameters(mirostat=kind), 300, value)
        with np.errstate(divide="ignore"):
            assert 0 <= feedback.draw(np.array(logits, np.float32), 0.7) < len(logits)
        assert math.isfinite(feedback.value)


def test_adaptive_p_draws_near_its_target_and_pushes_back() -> None:
    near = parameters(adaptive_target=0.25, adaptive_decay=0.5)
    feedback = Feedback(near, 5, None)
    drawn = [feedback.draw(LOGITS, (number * 0.618) % 1) for number in range(400)]
    assert drawn.count(1) > 150
    assert feedback.value == float(np.float32(feedback.value))
    # After likely tokens it wants unlikely ones, and the other way round.
    assert Feedback(near, 5, 0.5).draw(LOGITS, 0.5) >= 2
    assert Feedback(near, 5, 0.0).draw(LOGITS, 0.3) == 0
    feedback = Feedback(near, 5, 0.5)
    index = feedback.draw(LOGITS, 0.99)
    assert feedback.value == pytest.approx(0.5 * 0.5 + 0.5 * math.exp(LOGITS[index]))


def test_a_value_that_is_carried_on_continues_the_same_draws() -> None:
    random = np.random.default_rng(8)
    rows = (random.standard_normal((40, 500)) * 3).astype(np.float32)
    for fields in ({"mirostat": 1}, {"mirostat": 2}, {"adaptive_target": 0.3}):
        own = parameters(**fields, seed=6, top_k=200)
        whole = make_feedback(own, 500, None)
        value = None
        for position, row in enumerate(rows):
            expected = choose_token(row, Choice(own, position, feedback=whole), filter_candidates)
            again = make_feedback(own, 500, value)
            assert again is not None
            assert choose_token(row, Choice(own, position, feedback=again), filter_candidates) == expected
            value = float(np.float32(again.value))


def test_nothing_is_carried_where_nothing_is_drawn() -> None:
    greedy = SamplingParams(temperature=0.0, mirostat=2)
    assert make_feedback(greedy, 5, None) is None
    assert make_feedback(parameters(), 5, None) is None
    assert make_feedback(SamplingParams(temperature=0.0, dynatemp_range=0.5, mirostat=2), 5, None) is not None

"""Filters, the draw, log probabilities, orders of samplers, mirostat and adaptive-p against their definitions."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.messages.sampling import SAMPLERS, SamplingParams
from caravan_shard.arrays import Floats, Ids
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.draw import Purpose, draw_index, uniform
from caravan_shard.sampling.feedback import Feedback, make_feedback
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.logprobs import token_logprobs
from caravan_shard.sampling.order import DEFAULT_ORDER, apply_in_order, temperature_of
from caravan_shard.sampling.peaks import Peaks
from caravan_shard.sampling.penalties import make_penalties
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sampling.token_candidates import find_candidates

LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))


def random_logits(size: int = 5_000, scale: float = 3.0, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def from_probabilities(*probabilities: float) -> Floats:
    return np.log(np.array(probabilities, np.float32))


def kept(logits: Floats, **fields: float) -> list[int]:
    return sorted(filter_candidates(logits, SamplingParams(**fields)).tolist())  # type: ignore[arg-type]


def test_each_filter_keeps_the_candidates_of_its_definition() -> None:
    logits = from_probabilities(0.1, 0.5, 0.05, 0.3, 0.05)
    assert kept(logits, top_k=2) == [1, 3]
    assert kept(logits, top_p=0.5) == [1]
    assert kept(logits, top_p=0.79) == [1, 3]
    assert kept(logits, top_p=0.85) == [0, 1, 3]
    assert kept(logits, min_p=0.5) == [1, 3]
    # The entropy is 1.25 and the surprises are 2.3, 0.69, 3.0, 1.2, 3.0: token 3 is the most typical.
    assert kept(logits, typical_p=0.2) == [3]
    assert kept(logits, typical_p=0.5) == [1, 3]
    assert kept(logits, top_k=3, top_p=0.8, min_p=0.7) == [1]
    # Two tokens are likely enough: the likelier one goes.
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.2) == [0, 2, 3, 4]
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.09) == [0, 2, 4]
    assert kept(logits, xtc_probability=1.0, xtc_threshold=0.4) == [0, 1, 2, 3, 4]
    assert kept(logits, top_k=2, xtc_probability=1.0, xtc_threshold=0.3) == [3]


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParams(temperature=0.7, top_k=40),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=2.5, top_p=0.99),
        SamplingParams(temperature=0.3, top_k=4_000, top_p=0.8),
        SamplingParams(temperature=0.9, typical_p=0.9, top_p=0.8),
        SamplingParams(temperature=0.01, top_p=0.9, min_p=0.3),
        SamplingParams(temperature=0.5, top_p=0.9, xtc_probability=1.0, xtc_threshold=0.02),
        SamplingParams(temperature=0.5, top_k=40, min_p=0.01, xtc_probability=1.0, xtc_threshold=0.02),
        SamplingParams(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.02),
    ],
    ids=str,
)
def test_filtering_the_likeliest_candidates_equals_filtering_all(
    parameters: SamplingParams,
) -> None:
    for seed in range(5):
        logits = random_logits(seed=seed)
        scaled = (logits - logits.max()) / np.float32(parameters.temperature)
        every = np.flatnonzero(scaled > -80)
        whole = every[filter_candidates(scaled[every], parameters)]
        candidates = find_candidates(logits, parameters)
        few = candidates.ids
        if candidates.parameters is not None:
            few = few[filter_candidates(candidates.scaled, candidates.parameters)]
        assert sorted(few.tolist()) == sorted(whole.tolist())


@pytest.mark.parametrize("size", [1, 63, 64, 65, 700, 5_000, 50_257])
def test_peaks_find_the_highest_logits(size: int) -> None:
    for seed, logits in enumerate((random_logits(size), np.round(random_logits(size)), np.zeros(size, np.float32))):
        peaks = Peaks(logits)
        assert peaks.highest == logits.max()
        for count in {1, min(2, size), min(40, size), min(600, size), size}:
            level = peaks.level(count)
            assert level <= np.sort(logits)[-count]
            found = peaks.reaching(level)
            assert found.tolist() == np.flatnonzero(logits >= level).tolist()
            if seed == 0:
                assert len(found) <= 2 * count + 20


def test_peaks_see_nan_anywhere() -> None:
    for size in (1, 5_000, 50_257):
        for place in (0, size // 2, size - 1):
            logits = random_logits(size)
            assert Peaks(logits).is_finite
            logits[place] = np.nan
            assert not Peaks(logits).is_finite


def test_sampled_tokens_follow_the_distribution() -> None:
    logits = from_probabilities(0.2, 0.5, 0.3) - np.float32(np.log(0.5))
    drawn = Counter(draw_index(logits, uniform(5, position)) for position in range(4_000))
    assert [round(drawn[index] / 4_000, 1) for index in range(3)] == [0.2, 0.5, 0.3]


def test_a_draw_over_a_large_vocabulary_inverts_the_running_sum() -> None:
    logits = random_logits(40_123)
    logits -= logits.max()
    cumulative = np.cumsum(np.exp(logits.astype(np.float64)))
    for position in range(300):
        number = uniform(1, position)
        assert abs(draw_index(logits, number) - int(np.searchsorted(cumulative, number * cumulative[-1]))) <= 1
    assert draw_index(logits, 0.0) == 0
    assert 40_000 < draw_index(logits, 1 - 2**-53) < 40_123


def test_the_random_number_depends_only_on_seed_and_position() -> None:
    numbers = {uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(50)}
    assert len(numbers) == 150
    assert all(0 <= number < 1 for number in numbers)
    # Pinned: with other numbers, a sequence that a newer shard resumes would draw other tokens.
    assert uniform(7, 100) == 0.20719617945673485
    assert uniform(7, 100, Purpose.XTC) == 0.13037417699432385


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.sampled_from(Purpose))
def test_a_number_is_that_of_a_generator_at_its_position(seed: int, position: int, purpose: Purpose) -> None:
    word = int(np.random.Philox(key=seed, counter=position).random_raw(4)[purpose.value])
    assert uniform(seed, position, purpose) == (word >> 11) / 2**53


def test_xtc_and_the_token_use_different_random_numbers() -> None:
    numbers = {uniform(3, position, purpose) for position in range(500) for purpose in Purpose}
    assert len(numbers) == 1_000
    logits = from_probabilities(0.4, 0.35, 0.25)
    parameters = SamplingParams(temperature=1.0, seed=3, xtc_probability=0.3, xtc_threshold=0.3)
    for position in range(500):
        token = choose_token(logits, Choice(parameters, position), filter_candidates)
        number = uniform(3, position)
        if uniform(3, position, Purpose.XTC) < 0.3:
            assert token == (1 if number < 0.35 / 0.6 else 2)
        else:
            assert token == int(np.searchsorted([0.4, 0.75], number))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_barred_tokens_are_chosen_only_where_a_grammar_allows_no_other(temperature: float) -> None:
    logits = from_probabilities(0.9, 0.05, 0.03, 0.02)
    parameters = SamplingParams(temperature=temperature, top_p=0.99)
    for position in range(20):
        for allowed, expected in ((None, {2, 3}), ([0, 1], {0, 1}), ([1, 3], {3}), ([1], {1})):
            ids = None if allowed is None else Allowed.of(allowed)
            choice = Choice(parameters, position, (), ids, frozenset({0, 1}))
            assert choose_token(logits, choice, filter_candidates) in expected
    assert (logits == from_probabilities(0.9, 0.05, 0.03, 0.02)).all()


def test_greedy_is_the_most_likely_token_and_ignores_filters() -> None:
    logits = random_logits()
    choice = Choice(SamplingParams(temperature=0.0, top_k=3, seed=1), 5)
    assert choose_token(logits, choice, filter_candidates) == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures_give_valid_tokens(temperature: float) -> None:
    logits = random_logits(1_000)
    for fields in ({}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.5}, {"min_p": 0.5}):
        choice = Choice(SamplingParams(temperature=temperature, **fields), 5)
        token = choose_token(logits, choice, filter_candidates)
        assert 0 <= token < 1_000
        if temperature < 1:
            assert token == int(logits.argmax())


def test_nan_logits_still_give_a_token() -> None:
    logits = random_logits(1_000)
    logits[3] = np.nan
    for fields in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        choice = Choice(SamplingParams(temperature=1.0, **fields), 5)
        assert 0 <= choose_token(logits, choice, filter_candidates) < 1_000


@pytest.mark.parametrize("threads", [1, 4])
def test_each_row_of_a_batch_is_sampled_with_its_own_parameters(threads: int) -> None:
    logits = np.stack([random_logits(seed=seed) for seed in range(12)])
    choices = [
        Choice(SamplingParams(temperature=row % 3 * 0.5, top_k=row * 7, seed=row), 100 + row) for row in range(12)
    ]
    sampler = Sampler(filter_candidates, threads)
    tokens = sampler.choose(logits, choices)
    sampler.close()
    assert tokens == [choose_token(logits[row], choices[row], filter_candidates) for row in range(12)]


def test_a_filter_may_return_any_order() -> None:
    def shuffled(logits: Floats, parameters: SamplingParams) -> Ids:
        return filter_candidates(logits, parameters)[::-1].copy()

    logits = random_logits()
    for position in range(20):
        choice = Choice(SamplingParams(temperature=1.0, top_k=50, seed=3), position)
        assert choose_token(logits, choice, shuffled) == choose_token(logits, choice, filter_candidates)


def test_logprobs_are_the_log_softmax() -> None:
    logits = random_logits()
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    found = token_logprobs(logits, 17, 4)
    order = np.argsort(-exact)[:4]
    assert found.chosen == pytest.approx(exact[17], abs=1e-5)
    assert found.top_ids == order.tolist()
    assert found.top == pytest.approx(exact[order].tolist(), abs=1e-5)


def test_equally_likely_alternatives_come_in_order_of_their_ids() -> None:
    logits = np.zeros(10, np.float32)
    logits[[2, 8]] = 1.0
    assert token_logprobs(logits, 0, 2).top_ids == [2, 8]


def in_order(*first: str) -> tuple[str, ...]:
    return first + tuple(name for name in SAMPLERS if name not in first)


def left(logits: Floats, parameters: SamplingParams, tokens: Sequence[int] = ()) -> dict[int, float]:
    """Return the tokens that may be drawn behind the output ``tokens``, and their probabilities."""
    penalties = make_penalties(parameters, lambda token: b"%d" % token)
    for penalty in penalties:
        penalty.add(tokens, output=True)
    ids, relative = apply_in_order(logits, None, parameters, penalties, filter_candidates)
    weights = np.exp(relative.astype(np.float64))
    return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


def test_top_n_sigma_keeps_what_is_near_the_peak() -> None:
    logits = np.array([4.0, 0.0, 3.0, -1.0, -np.inf, 2.0], np.float32)
    # The deviation of the five finite ones is 1.85.
    for sigmas, kept in ((0.5, [0]), (0.6, [0, 2]), (1.1, [0, 2, 5]), (3.0, [0, 1, 2, 3, 5])):
        assert find_candidates(logits, SamplingParams(temperature=1.0, top_n_sigma=sigmas)).ids.tolist() == kept
        # It does not depend on the temperature.
        assert find_candidates(logits, SamplingParams(temperature=0.2, top_n_sigma=sigmas)).ids.tolist() == kept


def test_other_filters_see_what_top_n_sigma_left() -> None:
    logits = random_logits()
    level = logits.max() - 1.5 * logits.std(dtype=np.float64)
    near = np.flatnonzero(logits >= level)
    for fields in ({"top_p": 0.7}, {"typical_p": 0.7}, {"min_p": 0.4}, {"top_k": 3}):
        rest = SamplingParams(temperature=2.0, **fields)
        scaled = (logits[near] - logits.max()) / np.float32(2.0)
        expected = near[filter_candidates(scaled, rest)]
        found = find_candidates(logits, replace(rest, top_n_sigma=1.5))
        ids = found.ids
        if found.parameters is not None:
            ids = ids[filter_candidates(found.scaled, found.parameters)]
        assert sorted(ids.tolist()) == sorted(expected.tolist())


def test_the_dynamic_temperature_follows_the_entropy() -> None:
    parameters = SamplingParams(temperature=1.0, dynatemp_range=0.6)
    assert temperature_of(np.zeros(50, np.float32), parameters) == pytest.approx(1.6)
    sure = np.array([0.0, -200.0, -np.inf], np.float32)
    assert temperature_of(sure, parameters) == pytest.approx(0.4)
    assert temperature_of(sure, replace(parameters, dynatemp_range=2.0)) == pytest.approx(0.0)
    assert temperature_of(sure, replace(parameters, dynatemp_range=0.0)) == 1.0
    # Two of four candidates are equally likely: half of the highest entropy.
    half = np.array([0.0, 0.0, -200.0, -200.0], np.float32)
    assert temperature_of(half, parameters) == pytest.approx(1.0)
    assert temperature_of(half, replace(parameters, dynatemp_exponent=2.0)) == pytest.approx(0.4 + 1.2 * 0.25)
    assert temperature_of(np.array([5.0], np.float32), parameters) == 1.0


def test_a_dynamic_temperature_comes_last_unless_an_order_is_given() -> None:
    logits = np.array([3.0, 3.0, 0.0, 0.0, 0.0, 0.0], np.float32)
    parameters = SamplingParams(temperature=1.0, dynatemp_range=0.9, top_k=2)
    assert left(logits, parameters) == {0: 0.5, 1: 0.5}
    assert parameters.order == SAMPLERS
    # Two that are equally likely have the highest entropy, six that are not have less.
    peaked = replace(parameters, top_k=3)
    last, first = left(logits, peaked), left(logits, replace(peaked, samplers=in_order("temperature")))
    assert first.keys() == last.keys() == {0, 1, 2}
    assert first != last


def test_a_temperature_of_zero_with_a_range_still_draws() -> None:
    logits = np.zeros(20, np.float32)
    parameters = SamplingParams(temperature=0.0, dynatemp_range=1.0, seed=4)
    tokens = {choose_token(logits, Choice(parameters, position), filter_candidates) for position in range(200)}
    assert len(tokens) == 20
    # It is 0 where the model is sure.
    logits[7] = 90.0
    assert choose_token(logits, Choice(parameters, 0), filter_candidates) == 7


def test_the_order_decides_what_each_sampler_sees() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    parameters = SamplingParams(temperature=4.0, top_p=0.65)
    assert left(logits, replace(parameters, samplers=in_order("top_p", "temperature"))).keys() == {0, 1}
    assert left(logits, replace(parameters, samplers=in_order("temperature", "top_p"))).keys() == {0, 1, 2}
    both = SamplingParams(temperature=1.0, top_k=3, top_p=0.7)
    assert left(logits, replace(both, samplers=in_order("top_k", "top_p"))).keys() == {0, 1}
    assert left(logits, replace(both, samplers=in_order("top_p", "top_k"))).keys() == {0, 1}
    both = replace(both, top_k=2, top_p=0.55)
    assert left(logits, replace(both, samplers=in_order("top_k", "top_p"))).keys() == {0}
    assert left(logits, replace(both, samplers=in_order("top_p", "top_k"))).keys() == {0, 1}


def test_penalties_may_come_behind_filters_and_behind_the_temperature() -> None:
    logits = np.array([4.0, 3.0, 2.0, -1.0], np.float32)
    parameters = SamplingParams(temperature=2.0, top_k=2, repetition_penalty=4.0)
    before = left(logits, replace(parameters, samplers=in_order("penalties", "top_k")), [0])
    behind = left(logits, replace(parameters, samplers=in_order("top_k", "penalties")), [0])
    assert before.keys() == {1, 2}
    assert behind.keys() == {0, 1}
    # Logits 1 and 3, then divided by 2; or 2 and 1.5, of which the first is divided by 4.
    assert behind[1] == pytest.approx(1 / (1 + math.exp(-1.0)), rel=1e-5)
    divided = left(logits, replace(parameters, samplers=in_order("top_k", "temperature", "penalties")), [0])
    assert divided[1] == pytest.approx(1 / (1 + math.exp(-1.0)), rel=1e-5)
    negative = left(logits - 5, replace(parameters, samplers=in_order("top_k", "temperature", "penalties")), [0])
    # -0.5 becomes -2, beside -1.
    assert negative[1] == pytest.approx(1 / (1 + math.exp(-1.0)), rel=1e-5)


def test_a_high_temperature_that_comes_last_makes_unlikely_tokens_likely() -> None:
    logits = np.full(1_000, -60.0, np.float32)
    logits[3] = 0.0
    hot = SamplingParams(temperature=30.0, top_k=5, samplers=SAMPLERS)
    assert left(logits, hot)[3] == pytest.approx(1 / (1 + 4 * math.exp(-2.0)), rel=1e-5)


@given(
    fields=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7])},
        optional={
            "top_n_sigma": st.sampled_from([1.0, 3.0]),
            "top_k": st.sampled_from([1, 7, 60]),
            "typical_p": st.just(0.8),
            "top_p": st.sampled_from([0.3, 0.95]),
            "min_p": st.just(0.1),
            "repetition_penalty": st.just(1.3),
            "dry_multiplier": st.just(0.8),
            "xtc_probability": st.just(0.5),
        },
    ),
    seed=st.integers(0, 30),
    allowed=st.booleans(),
)
def test_the_default_order_written_out_draws_the_same_tokens(fields: dict[str, Any], seed: int, allowed: bool) -> None:
    logits = random_logits(300, seed=seed)
    some = Allowed.of(np.arange(0, 300, 2)) if allowed else None
    parameters = SamplingParams(**{"temperature": 0.0, "seed": seed, **fields})

    def drawn(own: SamplingParams) -> list[int]:
        penalties = make_penalties(own, lambda token: b"%d" % token)
        for penalty in penalties:
            penalty.add([1, 2, 3, 1, 2, 3, 1, 2], output=True)
        choices = [Choice(own, position, penalties, some, frozenset({4})) for position in range(10)]
        return [choose_token(logits, choice, filter_candidates) for choice in choices]

    expected = drawn(parameters)
    assert drawn(replace(parameters, samplers=DEFAULT_ORDER)) == expected
    assert 4 not in expected


@pytest.mark.parametrize("order", [DEFAULT_ORDER, SAMPLERS, tuple(reversed(SAMPLERS))])
def test_logits_that_are_not_numbers_still_give_a_token(order: tuple[str, ...]) -> None:
    logits = random_logits(1_000)
    logits[3] = np.nan
    fields: dict[str, Any]
    for fields in ({}, {"top_k": 5}, {"top_n_sigma": 1.0}, {"dynatemp_range": 0.5}, {"min_p": 0.5}):
        parameters = SamplingParams(temperature=0.7, samplers=order, **fields)
        assert 0 <= choose_token(logits, Choice(parameters, 5), filter_candidates) < 1_000
        default = replace(parameters, samplers=())
        assert 0 <= choose_token(logits, Choice(default, 5), filter_candidates) < 1_000


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e30])
def test_extreme_temperatures_in_an_order_give_valid_tokens(temperature: float) -> None:
    logits = random_logits(1_000)
    for order in (SAMPLERS, tuple(reversed(SAMPLERS))):
        parameters = SamplingParams(temperature=temperature, top_p=0.5, samplers=order)
        token = choose_token(logits, Choice(parameters, 5), filter_candidates)
        assert 0 <= token < 1_000
        if temperature < 1:
            assert token == int(logits.argmax())


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

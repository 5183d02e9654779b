"""Filters, the draw and log probabilities against their definitions."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats, Ids
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.draw import Purpose, draw_index, uniform
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.logprobs import token_logprobs
from caravan_shard.sampling.peaks import Peaks
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sampling.token_candidates import find_candidates


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

"""Top-n-sigma, the dynamic temperature, and samplers in an order of one's own."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.messages.sampling import SAMPLERS, SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.order import DEFAULT_ORDER, apply_in_order, temperature_of
from caravan_shard.sampling.penalties import make_penalties
from caravan_shard.sampling.token_candidates import find_candidates


def random_logits(size: int = 5_000, scale: float = 3.0, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


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

"""Sampling draws the token that llama.cpp's chain and the number of (seed, position) select.

The reference sorts nothing itself: the chain applies every filter to all tokens within a fixed reach of the peak, and
the draw is one running sum in float64. A change of a draw would change the output of every request with a seed.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.sampling.filter import LlamaFilter
from caravan_shard.sampling.choice import Choice, choose_token
from caravan_shard.sampling.draw import Purpose, draw_index, uniform
from caravan_testing.logits import kinds_of_logits

pytestmark = pytest.mark.model

SIZES = (49_152, 50_257, 300, 65, 1)
# As many tokens as Gemma has.
LARGE = 262_144
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 40},
    {"top_k": 1},
    {"top_k": 5_000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"typical_p": 0.9},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 100, "typical_p": 0.9, "top_p": 0.9},
    {"top_p": 0.9, "min_p": 0.02},
    {"typical_p": 0.8, "min_p": 0.01},
    {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    {"top_p": 0.9, "xtc_probability": 0.6, "xtc_threshold": 0.05},
    {"min_p": 0.02, "xtc_probability": 0.6, "xtc_threshold": 0.1},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0.6, "xtc_threshold": 0.1},
)


def reference(logits: Floats, parameters: SamplingParams, position: int, chain: LlamaFilter) -> int:
    """Return the token that the number selects among those that the chain keeps."""
    temperature = np.float32(parameters.temperature)
    if parameters.xtc_probability <= uniform(parameters.seed, position, Purpose.XTC):
        parameters = replace(parameters, xtc_probability=0.0)
    if np.isnan(logits).any():
        return int(logits.argmax())
    peak = logits.max()
    ids = np.arange(len(logits))
    if parameters.filters:
        reach = 36.0
        with np.errstate(over="ignore"):
            weights = np.exp((logits - peak) / temperature)
        near = np.flatnonzero(logits >= peak - np.float32(10.0) * temperature)
        if parameters.top_k > 0:
            # Which of several equally likely tokens the chain keeps depends on how many it gets.
            reach = 10.0 if len(near) >= parameters.top_k else 36.0
        elif parameters.typical_p == 1.0 and parameters.top_p < 1.0:
            # The chain's sums in float32 are closer over few tokens. top_p of the whole is a larger share of a part.
            share = parameters.top_p * weights.sum(dtype=np.float64) / weights[near].sum(dtype=np.float64)
            if share <= 0.9999:
                reach, parameters = 10.0, replace(parameters, top_p=float(share))
        ids = np.flatnonzero(logits >= peak - np.float32(reach) * temperature)
        ids = ids[np.sort(chain((logits[ids] - peak) / temperature, parameters))]
    with np.errstate(over="ignore"):
        cumulative = np.cumsum(np.exp((logits[ids] - peak) / temperature), dtype=np.float64)
    place = int(np.searchsorted(cumulative, uniform(parameters.seed, position) * cumulative[-1], side="right"))
    return int(ids[min(place, len(ids) - 1)])


def check(size: int, fields: dict[str, Any], *, draws: int) -> None:
    """Compare draws of every kind of logits at several temperatures."""
    chain = LlamaFilter(size)
    for kind, logits in kinds_of_logits(size):
        for number, temperature in enumerate((0.8, 1.0, 0.02, 1.7)):
            parameters = SamplingParams(temperature=temperature, seed=size + number, **fields)
            for position in range(draws):
                token = choose_token(logits, Choice(parameters, position), chain)
                assert token == reference(logits, parameters, position, chain), (size, kind, temperature, position)


@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_each_draw_is_that_of_llama_cpps_chain(fields: dict[str, Any]) -> None:
    for size in SIZES:
        # The slow test below repeats the large ones.
        check(size, fields, draws=1 if size > 10_000 else 3)


@pytest.mark.slow
@pytest.mark.parametrize("fields", FILTERS, ids=str)
def test_more_draws_from_large_vocabularies_are_those_of_llama_cpps_chain(fields: dict[str, Any]) -> None:
    for size in SIZES:
        if size > 10_000:
            check(size, fields, draws=3)
    # Without top_k, typical_p and XTC sort the whole vocabulary, which takes 50 ms at the largest size.
    if fields.keys().isdisjoint({"typical_p", "xtc_probability"}) or "top_k" in fields:
        check(LARGE, fields, draws=1)


def test_a_number_next_to_the_border_of_two_tokens_selects_the_right_one() -> None:
    """Sums in float32 cannot tell the two apart."""
    random = np.random.default_rng(1)
    for scale in (0.01, 1.0, 4.0):
        logits = (random.standard_normal(49_152) * scale).astype(np.float32)
        logits -= logits.max()
        cumulative = np.cumsum(np.exp(logits), dtype=np.float64)
        for token in random.integers(1, 49_151, 300).tolist():
            border = cumulative[token] / cumulative[-1]
            for number in (border - 1e-11, border + 1e-11):
                expected = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
                assert draw_index(logits, number) == expected

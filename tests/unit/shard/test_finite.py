"""Rows of NaN or infinite logits are found however a token is chosen; tokens that are ruled out may have -inf."""

import numpy as np
import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Allowed, Choice
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.peaks import rows_without_numbers
from caravan_shard.sampling.penalties import make_biases
from caravan_shard.sampling.sampler import Sampler

_SIZE = 500
_CHOICES = {
    "greedy": Choice(SamplingParams(), 7),
    "drawn": Choice(SamplingParams(temperature=1.0, seed=3), 7),
    "top_k": Choice(SamplingParams(temperature=0.7, top_k=20, seed=3), 7),
    "top_p": Choice(SamplingParams(temperature=0.7, top_p=0.9, seed=3), 7),
    "min_p": Choice(SamplingParams(temperature=0.7, min_p=0.1, seed=3), 7),
    "typical_p": Choice(SamplingParams(temperature=0.7, typical_p=0.9, seed=3), 7),
    "top_n_sigma": Choice(SamplingParams(temperature=0.7, top_n_sigma=1.0, seed=3), 7),
    "xtc": Choice(SamplingParams(temperature=0.7, xtc_probability=1.0, xtc_threshold=0.1, seed=3), 7),
    "in order": Choice(SamplingParams(temperature=0.7, top_k=20, seed=3, samplers=("temperature", "top_k")), 7),
    "barred": Choice(SamplingParams(temperature=1.0, seed=3), 7, barred=(1, 2)),
    "biased": Choice(SamplingParams(), 7, biases=make_biases([(3, 100.0)])),
}
_CONSTRAINED = {
    "one token": Choice(SamplingParams(), 7, allowed=Allowed.of([5])),
    "greedy": Choice(SamplingParams(), 7, allowed=Allowed.of([5, 9])),
    "drawn": Choice(SamplingParams(temperature=1.0, seed=3), 7, allowed=Allowed.of([5, 9])),
}


def _logits() -> Floats:
    return np.random.default_rng(5).normal(0, 4, _SIZE).astype(np.float32)


def _broken(choice: Choice, logits: Floats) -> bool:
    """Whether the second of two rows is found; the first one is a good one."""
    rows = np.stack([_logits(), logits])
    tokens = Sampler(filter_candidates, threads=1).choose(rows, [choice, choice])
    found = rows_without_numbers(rows, tokens)
    assert found in ([], [1])
    return found == [1]


@pytest.mark.parametrize("choice", _CHOICES.values(), ids=_CHOICES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("places", [slice(None), slice(77, 78), slice(_SIZE - 1, None)], ids=str)
def test_nan_and_infinity_are_found(choice: Choice, value: float, places: slice) -> None:
    logits = _logits()
    logits[places] = value
    assert _broken(choice, logits)


@pytest.mark.parametrize("choice", _CHOICES.values(), ids=_CHOICES)
def test_a_row_in_which_no_token_is_possible_is_found(choice: Choice) -> None:
    assert _broken(choice, np.full(_SIZE, -np.inf, np.float32))


@pytest.mark.parametrize("choice", _CONSTRAINED.values(), ids=_CONSTRAINED)
def test_nan_is_found_under_a_constraint(choice: Choice) -> None:
    assert _broken(choice, np.full(_SIZE, np.nan, np.float32))


@pytest.mark.parametrize("choice", [*_CHOICES.values(), *_CONSTRAINED.values()])
def test_tokens_that_the_model_rules_out_are_no_error(choice: Choice) -> None:
    logits = _logits()
    logits[::2] = -np.inf
    assert not _broken(choice, logits)


@pytest.mark.parametrize(
    "choice",
    [
        Choice(SamplingParams(), 7, biases=make_biases([(3, np.inf)])),
        Choice(SamplingParams(temperature=1.0, seed=3), 7, biases=make_biases([(3, np.inf)])),
        Choice(SamplingParams(), 7, biases=make_biases([(token, -np.inf) for token in range(_SIZE)])),
    ],
)
def test_infinite_biases_are_not_the_model_s(choice: Choice) -> None:
    assert not _broken(choice, _logits())

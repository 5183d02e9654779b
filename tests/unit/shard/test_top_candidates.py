"""Draws from the highest logits of a row are those from all of them, and rows of NaN or infinite logits are found."""

from collections.abc import Sequence

import numpy as np
import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.joint_draw import LEFT
from caravan_shard.sampling.peaks import rows_without_numbers
from caravan_shard.sampling.penalties import make_biases
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sampling.top_candidates import TopCandidates, candidate_class, candidates_needed, draw_from

GREEDY = SamplingParams(temperature=0.0)
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=5)

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


def highest(logits: Floats, count: int, *, shuffled_with: int) -> TopCandidates:
    """Return the candidates as a device does: in no order."""
    ids = np.argsort(-logits, kind="stable")[:count]
    ids = np.random.default_rng(shuffled_with).permutation(ids)
    return TopCandidates(ids.astype(np.int32), logits[ids], whole=count == len(logits))


def drawn(logits: Floats, parameters: SamplingParams, count: int, position: int = 0) -> int:
    """Return the token, or LEFT."""
    sampler = Sampler(filter_candidates, 1)
    row = highest(logits, count, shuffled_with=position)
    return draw_from([row], [Choice(parameters, position)], sampler)[0]


@pytest.mark.parametrize(
    "parameters",
    [
        GREEDY,
        SamplingParams(temperature=1.3, top_k=40, seed=3),
        SamplingParams(temperature=0.3, top_k=1, seed=4),
        FILTERED,
        SamplingParams(temperature=1.0, top_k=63, min_p=0.1, seed=6),
    ],
    ids=["greedy", "top-k", "one", "filtered", "min-p"],
)
def test_tokens_are_those_of_all_logits(parameters: SamplingParams) -> None:
    random = np.random.default_rng(1)
    size = candidate_class(candidates_needed(parameters))
    for position in range(300):
        logits = random.normal(0, 3, 5000).astype(np.float32)
        expected = choose_token(logits, Choice(parameters, position), filter_candidates)
        assert drawn(logits, parameters, size, position) == expected


def test_rows_of_several_sizes_are_drawn_together() -> None:
    random = np.random.default_rng(2)
    rows: list[TopCandidates | None] = []
    choices, expected = [], []
    for position in range(30):
        logits = random.normal(0, 3, 900).astype(np.float32)
        parameters = (GREEDY, FILTERED)[position % 2]
        choices.append(Choice(parameters, position))
        if position % 5 == 4:
            rows.append(None)
            expected.append(LEFT)
        else:
            rows.append(highest(logits, (16, 64, 256)[position % 3 or 1], shuffled_with=position))
            expected.append(choose_token(logits, choices[-1], filter_candidates))
    assert draw_from(rows, choices, Sampler(filter_candidates, 1)) == expected


def _tied(places: Sequence[int], size: int = 1000) -> Floats:
    """Return falling logits, of which those at ``places`` are equal."""
    logits = np.linspace(5, -5, size, dtype=np.float32)
    logits[list(places)] = logits[places[0]]
    return logits


def test_a_row_is_left_where_a_filter_cuts_among_equal_logits() -> None:
    top_k = SamplingParams(temperature=1.0, top_k=20, seed=1)
    assert drawn(_tied([19, 20]), top_k, 64) == LEFT
    assert drawn(_tied([18, 19]), top_k, 64) != LEFT
    assert drawn(_tied([20, 21]), top_k, 64) != LEFT
    assert drawn(_tied([3, 4]), FILTERED, 64) == LEFT
    assert drawn(_tied([30, 31]), FILTERED, 64) != LEFT


def test_the_lowest_of_equal_ids_is_chosen_if_it_is_a_candidate() -> None:
    assert drawn(_tied(range(15)), GREEDY, 16) == 0
    assert drawn(_tied(range(16)), GREEDY, 16) == LEFT
    assert drawn(_tied(range(16), 16), GREEDY, 16) == 0


def test_logits_that_are_no_numbers_leave_the_row() -> None:
    logits = np.full(100, np.nan, np.float32)
    assert drawn(logits, GREEDY, 16) == LEFT
    assert drawn(logits, FILTERED, 64) == LEFT


def test_too_few_candidates_leave_the_row() -> None:
    assert drawn(_tied([0]), FILTERED, 16) == LEFT
    assert drawn(_tied([0], 16), FILTERED, 16) != LEFT


@pytest.mark.parametrize(
    "parameters",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=256),
        SamplingParams(temperature=1.0, top_k=40, typical_p=0.9),
        SamplingParams(temperature=1.0, top_k=40, xtc_probability=0.5),
        SamplingParams(temperature=1.0, top_k=40, top_n_sigma=1.0),
        SamplingParams(temperature=1.0, top_k=40, mirostat=2),
        SamplingParams(temperature=1.0, top_k=40, dynatemp_range=0.5),
        SamplingParams(temperature=1.0, top_k=40, samplers=("top_k",)),
        SamplingParams(temperature=0.0, logprobs=True),
        SamplingParams(temperature=0.0, biases=((3, 1.0),)),
    ],
)
def test_what_needs_all_logits(parameters: SamplingParams) -> None:
    assert candidates_needed(parameters) == 0


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

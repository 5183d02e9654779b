"""The registry of a program's functions, and what the shard does with what they return."""

from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.processors import ProcessorRegistry, Processors
from caravan_shard.sampling.sampler import Sampler

LOGITS = np.array([0.0, 3.0, 1.0, 2.0], np.float32)


def test_functions_are_called_in_order_each_with_arrays_of_its_own() -> None:
    seen: list[Any] = []

    def halve(output: list[int], logits: Floats) -> Floats:
        seen.append((output, logits.tolist()))
        logits /= 2
        output.append(9)
        return logits

    processors = Processors([halve, halve])
    raw = LOGITS.copy()
    made = processors.apply((5, 6), raw)
    assert made is not None
    assert made.tolist() == (LOGITS / 4).tolist()
    assert seen == [([5, 6, 9], [0.0, 3.0, 1.0, 2.0]), ([5, 6, 9], [0.0, 1.5, 0.5, 1.0])]
    assert (raw == LOGITS).all()
    assert not processors.ended


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"must return logits of shape \(4,\). Given: None"),
        (np.zeros(3), r"must return logits of shape \(4,\). Given: shape \(3,\)"),
        (np.zeros((1, 4)), "shape"),
        ([0, 1, float("nan"), 2], "Given: NaN or inf"),
        ([0, 1, float("inf"), 2], "Given: NaN or inf"),
        ([-float("inf")] * 4, "must leave a token"),
        (["a", "b", "c", "d"], "could not convert string"),
    ],
    ids=str,
)
def test_what_is_no_logits_ends_the_functions(returned: Any, message: str) -> None:
    processors = Processors([lambda _output, _logits: returned])
    with np.errstate(all="raise"):
        assert processors.apply((), LOGITS) is None
    assert processors.ended
    with pytest.raises(ValueError, match=message):
        raise processors.error or AssertionError


def test_other_numbers_and_sequences_are_taken_as_logits() -> None:
    for returned in ([0, -float("inf"), 1, 2], np.array([0, -np.inf, 1, 2]), (0.0, -float("inf"), 1.0, 2.0)):
        made = Processors([lambda _output, _logits, returned=returned: returned]).apply((), LOGITS)  # type: ignore[misc]
        assert made is not None
        assert made.dtype == np.float32
        assert made.tolist() == [0, -np.inf, 1, 2]


def test_even_an_exit_of_the_program_ends_these_functions_alone() -> None:
    def leave(_output: list[int], _logits: Floats) -> Floats:
        raise SystemExit(3)

    processors = Processors([leave])
    assert processors.apply((), LOGITS) is None
    assert isinstance(processors.error, SystemExit)


def test_a_key_is_known_for_ever_and_its_functions_until_they_are_closed() -> None:
    registry = ProcessorRegistry()
    assert registry.find(0) is registry.find(1) is None
    with registry.registered([lambda _output, logits: logits]) as (key, processors):
        assert registry.find(key) is processors
        with registry.registered([]) as (other, _):
            assert other != key
    assert processors.ended
    found = registry.find(key)
    assert found is not None
    assert found.ended
    assert (found.apply((), LOGITS), found.error) == (None, None)
    assert registry.find(key + 2) is None


def test_a_token_is_chosen_from_processed_logits_with_everything_that_follows() -> None:
    processed = np.array([5.0, -np.inf, 4.0, 4.5], np.float32)
    greedy = SamplingParams(temperature=0.0)
    assert choose_token(LOGITS, Choice(greedy, 3, processed=processed), filter_candidates) == 0
    allowed = Allowed.of([1, 2, 3])
    assert choose_token(LOGITS, Choice(greedy, 3, allowed=allowed, processed=processed), filter_candidates) == 3
    sampler = Sampler(filter_candidates, 1)
    assert sampler.choose(np.stack([LOGITS] * 2), [Choice(greedy, 3), Choice(greedy, 3, processed=processed)]) == [1, 0]
    drawn = SamplingParams(temperature=1.0, seed=2)
    for position in range(50):
        alone = choose_token(processed, Choice(drawn, position), filter_candidates)
        assert choose_token(LOGITS, Choice(drawn, position, processed=processed), filter_candidates) == alone
    assert processed[0] == 5.0

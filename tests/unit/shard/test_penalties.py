"""What changes logits: penalties and DRY against their definitions, and the functions of a program."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.penalties import DryPenalty, OccurrencePenalty, make_penalties, suffix_matches
from caravan_shard.sampling.processors import ProcessorRegistry, Processors
from caravan_shard.sampling.sampler import Sampler

SIZE = 100
# A token that breaks every repetition.
BREAKER = ord("*")

LOGITS = np.array([0.0, 3.0, 1.0, 2.0], np.float32)


def random_logits(seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(SIZE) * 3).astype(np.float32)


def piece(token: int) -> bytes:
    return bytes([token])


def expected_penalties(parameters: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    """Apply the three penalties to `random_logits` by their formulas."""
    last = parameters.repeat_last_n
    window = [(token, False) for token in prompt] + [(token, True) for token in output]
    window = window if last is None else window[len(window) - min(last, len(window)) :]
    logits = random_logits().astype(np.float64)
    for token in {token for token, _ in window}:
        penalty = parameters.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, times in Counter(token for token, is_output in window if is_output).items():
        logits[token] -= parameters.frequency_penalty * times + parameters.presence_penalty
    return logits.astype(np.float32)


@pytest.mark.parametrize("last", [None, 0, 1, 2, 3, 6, 7, 8, 100])
def test_penalties_follow_their_formula(last: int | None) -> None:
    prompt, output = [3, 7, 7, 9], [7, 11, 11, 3]
    parameters = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25, repeat_last_n=last
    )
    penalties = make_penalties(parameters, piece)
    for penalty in penalties:
        penalty.add(prompt, output=False)
        for token in output:
            penalty.add([token], output=True)
    logits = random_logits()
    for penalty in penalties:
        penalty.apply(logits)
    np.testing.assert_allclose(logits, expected_penalties(parameters, prompt, output), rtol=1e-5)


def test_occurrences_grow_beyond_their_initial_size() -> None:
    penalty = OccurrencePenalty(SamplingParams(temperature=0.0, frequency_penalty=1.0))
    penalty.add(range(2_000), output=True)
    penalty.add(range(1_000, 2_000), output=True)
    logits = np.zeros(2_001, np.float32)
    penalty.apply(logits)
    assert logits.tolist() == [-1.0] * 1_000 + [-2.0] * 1_000 + [0.0]


def test_only_active_penalties_are_built() -> None:
    assert make_penalties(SamplingParams(temperature=0.0), piece) == ()
    assert make_penalties(SamplingParams(temperature=0.0, repetition_penalty=1.1, repeat_last_n=0), piece) == ()
    assert make_penalties(SamplingParams(temperature=0.0, dry_multiplier=1.0, dry_penalty_last_n=0), piece) == ()
    both = make_penalties(SamplingParams(temperature=0.0, repetition_penalty=1.1, dry_multiplier=1.0), piece)
    assert [type(penalty) for penalty in both] == [OccurrencePenalty, DryPenalty]


TOKENS = st.lists(st.sampled_from([1, 2, 3, BREAKER]), max_size=40)


@given(TOKENS)
def test_suffix_matches_are_the_longest_common_suffixes(tokens: list[int]) -> None:
    assert suffix_matches(tokens) == [common_suffix(tokens[: end + 1], tokens) for end in range(len(tokens))]


def common_suffix(tokens: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(reversed(tokens), reversed(others), strict=False)
    return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(tokens), len(others)))


def expected_dry(parameters: SamplingParams, tokens: list[int]) -> Floats:
    """Return the penalty of each token by DRY's definition."""
    last = len(tokens) if parameters.dry_penalty_last_n is None else parameters.dry_penalty_last_n
    window = tokens[len(tokens) - min(last, len(tokens)) :]
    since_breaker = next((at for at, token in enumerate(reversed(window)) if token == BREAKER), len(window))
    longest: dict[int, int] = {}
    for end in range(1, len(window)):
        length = min(common_suffix(window[:end], window), since_breaker)
        longest[window[end]] = max(length, longest.get(window[end], 0))
    penalties = np.zeros(SIZE)
    for token, length in longest.items():
        if length >= parameters.dry_allowed_length and token != BREAKER and len(window) > parameters.dry_allowed_length:
            exponent = length - parameters.dry_allowed_length
            penalties[token] = parameters.dry_multiplier * parameters.dry_base**exponent
    return penalties.astype(np.float32)


@settings(max_examples=300)
@given(
    prompt=TOKENS,
    output=TOKENS,
    last=st.sampled_from([None, 1, 4, 10, 30]),
    allowed=st.integers(0, 4),
    read=st.booleans(),
)
def test_dry_follows_its_definition(
    prompt: list[int], output: list[int], last: int | None, allowed: int, *, read: bool
) -> None:
    """``read``: apply the penalty after every token of the output, so that its matches are updated one by one."""
    parameters = SamplingParams(
        temperature=0.0, dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=allowed, dry_penalty_last_n=last
    )
    penalty = DryPenalty(parameters, piece)
    penalty.add(prompt, output=False)
    for token in output:
        if read:
            penalty.apply(np.zeros(SIZE, np.float32))
        penalty.add([token], output=True)
    logits = np.zeros(SIZE, np.float32)
    penalty.apply(logits)
    np.testing.assert_allclose(-logits, expected_dry(parameters, [*prompt, *output]), rtol=1e-5)


def test_a_long_repetition_keeps_logits_finite() -> None:
    parameters = SamplingParams(temperature=0.0, dry_multiplier=1e38, dry_base=1e38, dry_penalty_last_n=None)
    penalty = DryPenalty(parameters, piece)
    penalty.add([5] * 20_000, output=False)
    logits = np.zeros(SIZE, np.float32)
    penalty.apply(logits)
    assert logits[5] < -1e8
    assert np.isfinite(logits).all()


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

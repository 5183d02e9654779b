"""Repetition, frequency and presence penalties and DRY against their definitions."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.penalties import DryPenalty, OccurrencePenalty, make_penalties, suffix_matches

SIZE = 100
# A token that breaks every repetition.
BREAKER = ord("*")


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

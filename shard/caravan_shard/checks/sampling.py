"""Checks that every sampling parameter is in its range."""

from collections.abc import Iterator, Sequence

import numpy as np

from caravan_proto.limits import MAX_BIAS, MAX_SCORE_TOKEN_IDS
from caravan_proto.messages.sampling import DEFAULTS, RANGES, SAMPLERS, Range, SamplingParams
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.checks.tokens import check_ids
from caravan_shard.protocol.results import Refusal, bad_request

MAX_TOP_N_TOKENS = 32
MAX_BIASES = 1024


@first_refusal
def check_sampling(sampling: SamplingParams, vocabulary_size: int) -> Iterator[Refusal | None]:
    """Check every value against its range."""
    for name, allowed in RANGES.items():
        switch = allowed.used_with
        if switch is None or getattr(sampling, switch) != DEFAULTS[switch]:
            yield _check_range(name, getattr(sampling, name), allowed)
    if sampling.mirostat and sampling.adaptive_target is not None:
        yield bad_request(f"adaptive_target must be absent with mirostat. Given: {sampling.adaptive_target}")
    if sampling.samplers and sorted(sampling.samplers) != sorted(SAMPLERS):
        names, given = ", ".join(SAMPLERS), ", ".join(sampling.samplers[: len(SAMPLERS) + 1])
        yield bad_request(f"samplers must be empty, or {names} in any order. Given: {given}")
    most = min(MAX_TOP_N_TOKENS, vocabulary_size)
    if not 0 <= sampling.top_n_tokens <= most:
        yield bad_request(f"top_n_tokens must be >= 0 and <= {most}. Given: {sampling.top_n_tokens}")
    if sampling.top_n_tokens and not sampling.logprobs:
        yield bad_request("top_n_tokens needs logprobs")
    yield _check_scored(sampling, vocabulary_size)
    yield _check_biases(sampling.biases, vocabulary_size)


def _check_scored(sampling: SamplingParams, vocabulary_size: int) -> Refusal | None:
    scored = sampling.score_token_ids
    if scored and (sampling.top_n_tokens or not sampling.logprobs):
        return bad_request("score_token_ids needs logprobs, and top_n_tokens must be 0")
    return check_score_ids(scored, vocabulary_size)


def check_score_ids(token_ids: Sequence[int], vocabulary_size: int) -> Refusal | None:
    """Check the tokens whose log probabilities are wanted."""
    if len(token_ids) > MAX_SCORE_TOKEN_IDS:
        return bad_request(f"there must be <= {MAX_SCORE_TOKEN_IDS} score_token_ids. Given: {len(token_ids)}")
    return check_ids("score_token_ids", token_ids, vocabulary_size)


def _check_range(name: str, value: float | None, allowed: Range) -> Refusal | None:
    if value is None:
        return None
    low, high = allowed.low, allowed.high
    # Both as they arrive: the wire rounds to float32. Written so that NaN is refused.
    is_above = value > low if allowed.above_low else value >= min(low, float(np.float32(low)))
    if is_above and value <= (high if isinstance(high, int) else max(high, float(np.float32(high)))):
        return None
    return bad_request(f"{name} must be {'>' if allowed.above_low else '>='} {low} and <= {high}. Given: {value}")


def _check_biases(biases: Sequence[tuple[int, float]], vocabulary_size: int) -> Refusal | None:
    if len(biases) > MAX_BIASES:
        return bad_request(f"there must be <= {MAX_BIASES} biases. Given: {len(biases)}")
    ids = [token for token, _ in biases]
    if max(ids, default=0) >= vocabulary_size:
        return bad_request(f"bias_token_ids must be < {vocabulary_size}. Given: {max(ids)}")
    if len(set(ids)) < len(ids):
        return bad_request("bias_token_ids must differ from one another")
    for _, bias in biases:
        # Written so that NaN is refused.
        if not abs(bias) <= MAX_BIAS:
            return bad_request(f"biases must be >= -{MAX_BIAS:g} and <= {MAX_BIAS:g}. Given: {bias:g}")
    return None

"""Checks that every sampling parameter is in its range."""

from collections.abc import Iterator

import numpy as np

from caravan_proto.limits import MAX_BIAS
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sampling.parameters import Biases, SamplingParameters

MAX_TOP_N_TOKENS = 32
MAX_BIASES = 1024
_MAX_INT32 = 2**31 - 1
_MAX_UINT64 = 2**64 - 1
_MAX_FLOAT = float(np.finfo(np.float32).max)


@first_refusal
def check_sampling(sampling: SamplingParameters, vocabulary_size: int) -> Iterator[Refusal | None]:
    """Check every value against its range."""
    yield _check_range("temperature", sampling.temperature, 0.0, _MAX_FLOAT)
    yield _check_range("top_k", sampling.top_k, 0, _MAX_INT32)
    for name, value in {"top_p": sampling.top_p, "typical_p": sampling.typical_p}.items():
        if not 0.0 < value <= 1.0:
            yield bad_request(f"{name} must be > 0 and <= 1. Given: {value}")
    yield _check_range("min_p", sampling.min_p, 0.0, 1.0)
    if not 0.0 < sampling.repetition_penalty <= _MAX_FLOAT:
        yield bad_request(f"repetition_penalty must be > 0 and finite. Given: {sampling.repetition_penalty}")
    yield _check_range("frequency_penalty", sampling.frequency_penalty, -_MAX_FLOAT, _MAX_FLOAT)
    yield _check_range("presence_penalty", sampling.presence_penalty, -_MAX_FLOAT, _MAX_FLOAT)
    yield _check_range("repeat_last_n", sampling.repeat_last_n or 0, 0, _MAX_INT32)
    yield _check_range("dry_multiplier", sampling.dry_multiplier, 0.0, _MAX_FLOAT)
    if sampling.dry_multiplier > 0.0:
        yield _check_range("dry_base", sampling.dry_base, 1.0, _MAX_FLOAT)
        yield _check_range("dry_allowed_length", sampling.dry_allowed_length, 0, _MAX_INT32)
        yield _check_range("dry_penalty_last_n", sampling.dry_penalty_last_n or 0, 0, _MAX_INT32)
    yield _check_range("xtc_probability", sampling.xtc_probability, 0.0, 1.0)
    yield _check_range("xtc_threshold", sampling.xtc_threshold, 0.0, 1.0)
    yield _check_range("seed", sampling.seed, 0, _MAX_UINT64)
    yield _check_range("top_n_tokens", sampling.top_n_tokens, 0, min(MAX_TOP_N_TOKENS, vocabulary_size))
    if sampling.top_n_tokens and not sampling.logprobs:
        yield bad_request("top_n_tokens needs logprobs")
    if sampling.biases is not None:
        yield _check_biases(sampling.biases, vocabulary_size)


def _check_range(name: str, value: float, low: float, high: float) -> Refusal | None:
    # Written so that NaN is refused.
    return None if low <= value <= high else bad_request(f"{name} must be >= {low} and <= {high}. Given: {value}")


def _check_biases(biases: Biases, vocabulary_size: int) -> Refusal | None:
    ids, values = biases.ids, biases.values
    if len(ids) != len(values):
        return bad_request(f"there must be a bias for each of bias_token_ids. Given: {len(values)} and {len(ids)}")
    if len(ids) > MAX_BIASES:
        return bad_request(f"there must be <= {MAX_BIASES} biases. Given: {len(ids)}")
    if ids.max(initial=0) >= vocabulary_size:
        return bad_request(f"bias_token_ids must be < {vocabulary_size}. Given: {ids.max()}")
    if len(np.unique(ids)) < len(ids):
        return bad_request("bias_token_ids must differ from one another")
    # Written so that NaN is refused.
    if not (np.abs(values) <= MAX_BIAS).all():
        given = values[~(np.abs(values) <= MAX_BIAS)][0]
        return bad_request(f"biases must be >= -{MAX_BIAS:g} and <= {MAX_BIAS:g}. Given: {given:g}")
    return None

"""Checks that every sampling parameter is in its range."""

import math

import numpy as np

from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sampling.parameters import Biases, SamplingParameters

MAX_TOP_N_TOKENS = 32
MAX_BIASES = 1024
# Most logits lie within 30 of each other, so this bias bans a token or forces it.
MAX_BIAS = 100.0
_MAX_INT32 = 2**31 - 1
_MAX_UINT64 = 2**64 - 1


def check_sampling(sampling: SamplingParameters, vocabulary_size: int) -> Refusal | None:
    """Check every value against its range."""
    finite = {
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
    }
    for name, value in finite.items():
        if not math.isfinite(value):
            return bad_request(f"{name} must be finite. Given: {value}")
    for name, value in {"top_p": sampling.top_p, "typical_p": sampling.typical_p}.items():
        if not 0.0 < value <= 1.0:
            return bad_request(f"{name} must be > 0 and <= 1. Given: {value}")
    if sampling.temperature < 0.0:
        return bad_request(f"temperature must be >= 0. Given: {sampling.temperature}")
    if not 0.0 <= sampling.min_p <= 1.0:
        return bad_request(f"min_p must be >= 0 and <= 1. Given: {sampling.min_p}")
    if sampling.repetition_penalty <= 0.0:
        return bad_request(f"repetition_penalty must be > 0. Given: {sampling.repetition_penalty}")
    if not 0 <= sampling.top_k <= _MAX_INT32:
        return bad_request(f"top_k must be <= {_MAX_INT32}. Given: {sampling.top_k}")
    if not 0 <= sampling.seed <= _MAX_UINT64:
        return bad_request(f"seed must be < 2^64. Given: {sampling.seed}")
    most = min(MAX_TOP_N_TOKENS, vocabulary_size)
    if not 0 <= sampling.top_n_tokens <= most:
        return bad_request(f"top_n_tokens must be <= {most}. Given: {sampling.top_n_tokens}")
    if sampling.top_n_tokens and not sampling.logprobs:
        return bad_request("top_n_tokens needs logprobs")
    return None if sampling.biases is None else _check_biases(sampling.biases, vocabulary_size)


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

"""Chooses a token from logits by `SamplingParams`, as the server does."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from caravan.errors import RequestError
from caravan.request_bodies import completion_body
from caravan.sampling_params import SamplingParams
from caravan_router.core.engine import ModelFacts
from caravan_router.http.limits import Limits
from caravan_router.http.openai.sampling import biases_of, check_sampling, samplings_of
from caravan_router.http.server.errors import ValidationError
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend
from caravan_shard.sampling.parameters import Biases, SamplingParameters
from caravan_shard.sampling.penalties import make_penalties
from caravan_shard.sampling.sampler import Choice, choose_token

_LIMITS = Limits()
# A token cannot be chosen by these.
_REFUSED = ("structured_outputs", "use_beam_search", "min_tokens")


def choose(
    backend: Backend, logits: Floats, params: SamplingParams, tokens: Sequence[int], outputs: Sequence[bool]
) -> int:
    """Choose the token that follows ``tokens``; ``outputs`` says which of them were sampled. Raises RequestError."""
    parameters = _parameters(backend, params)
    penalties = make_penalties(parameters, lambda token: backend.vocabulary.piece(token).data)
    start = 0
    while penalties and start < len(tokens):
        end = start
        while end < len(tokens) and outputs[end] == outputs[start]:
            end += 1
        for penalty in penalties:
            penalty.add(tokens[start:end], output=outputs[start])
        start = end
    return choose_token(logits, Choice(parameters, len(tokens), penalties), backend.candidate_filter)


def _parameters(backend: Backend, params: SamplingParams) -> SamplingParameters:
    for name in _REFUSED:
        if getattr(params, name):
            raise RequestError(f"`{name}` is for generations: a single token is not chosen by it")
    body, model = completion_body("-", params, 1), _facts(backend.facts.vocabulary_size)
    try:
        check_sampling(body)
        biases = biases_of(body.logit_bias, _LIMITS, model)
    except ValidationError as error:
        raise RequestError(str(error).removeprefix("Input validation error: ")) from None
    (chosen,) = samplings_of(body, 1, model, alternatives=None, biases=biases)
    fields = {name: getattr(chosen, name) for name in chosen.__dataclass_fields__ if name != "biases"}
    if not biases:
        return SamplingParameters(**fields)
    ids, values = zip(*biases, strict=True)
    return SamplingParameters(**fields, biases=Biases(np.array(ids, np.intp), np.array(values, np.float32)))


@lru_cache(maxsize=16)
def _facts(vocabulary_size: int) -> ModelFacts:
    """Return what the rules of sampling need of a model."""
    return ModelFacts(
        name="",
        fingerprint="",
        vocabulary_size=vocabulary_size,
        chat_template="",
        bos_text="",
        eos_text="",
        max_sequence_tokens=0,
        max_top_n_tokens=0,
        max_tokenize_bytes=0,
        total_cells=0,
    )

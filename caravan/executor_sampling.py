"""Chooses a token from logits by `SamplingParams`, as the server does."""

from collections.abc import Sequence

import numpy as np

from caravan.errors import GenerationError, RequestError
from caravan.executor_facts import LIMITS, model_facts
from caravan.processing import processor_error
from caravan.request_bodies import completion_body
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.openai.sampling import biases_of, check_sampling, samplings_of
from caravan_proto.messages.sampling import SamplingParams as Sampling
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER, text_ids
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend
from caravan_shard.sampling.biases import make_biases
from caravan_shard.sampling.choice import Choice, choose_token
from caravan_shard.sampling.finite import has_peak, rows_without_numbers
from caravan_shard.sampling.penalties import make_penalties
from caravan_shard.sampling.processors import Processors

# Parameters by which a single token cannot be chosen.
NOT_OF_A_TOKEN = ("structured_outputs", "use_beam_search", "min_tokens", "best_of", "mirostat")


def choose(
    backend: Backend, logits: Floats, params: SamplingParams, tokens: Sequence[int], outputs: Sequence[bool]
) -> int:
    """Choose the token that follows ``tokens``; ``outputs`` says which of them were sampled.

    Raises RequestError, LogitsProcessorError, or GenerationError if the logits are NaN or infinite.
    """
    parameters = _parameters(backend, params)
    penalties = make_penalties(parameters, lambda token: backend.vocabulary.piece(token).data)
    start = 0
    while penalties and start < len(tokens):
        end = start
        while end < len(tokens) and outputs[end] == outputs[start]:
            end += 1
        known = tokens[start:end]
        if max(known) >= FIRST_CELL_NUMBER:
            known = text_ids(known)
        for penalty in penalties:
            penalty.add(known, output=outputs[start])
        start = end
    if params.logits_processors and not has_peak(logits):
        raise _no_logits()
    processed = _processed(logits, params, [token for token, output in zip(tokens, outputs, strict=True) if output])
    choice = Choice(parameters, len(tokens), penalties, processed=processed, biases=make_biases(parameters.biases))
    token = choose_token(logits, choice, backend.candidate_filter)
    if rows_without_numbers(logits[np.newaxis], [token]):
        raise _no_logits()
    return token


def _no_logits() -> GenerationError:
    return GenerationError("the model computed no finite logits after these tokens")


def _processed(logits: Floats, params: SamplingParams, output: Sequence[int]) -> Floats | None:
    if not params.logits_processors:
        return None
    processors = Processors(params.logits_processors)
    processed = processors.apply(output, logits)
    if processors.error is not None:
        raise processor_error(processors.error)
    return processed


def _parameters(backend: Backend, params: SamplingParams) -> Sampling:
    for name in NOT_OF_A_TOKEN:
        if getattr(params, name):
            raise RequestError(f"`{name}` is for generations: a single token is not chosen by it")
    body, model = completion_body("-", params, 1), model_facts(backend)
    try:
        check_sampling(body)
        biases = biases_of(body.logit_bias, LIMITS, model)
        (chosen,) = samplings_of(body, 1, model, alternatives=None, biases=biases)
    except ValidationError as error:
        raise RequestError(str(error).removeprefix("Input validation error: ")) from None
    if chosen.adaptive_target is not None:
        raise RequestError("`adaptive_target` is for generations: a single token is not chosen by it")
    return chosen

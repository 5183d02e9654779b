"""How a conversation that is stepped by hand samples a token and ends an output, by the rules of `LLM.generate`."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index

import numpy as np
from numpy.typing import NDArray

from caravan.errors import GenerationError, LogitsProcessorError, RequestError
from caravan.options import MAX_STOPS
from caravan.outputs import Token
from caravan.request_bodies import generating_fields, named_refusals
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.generation.checks import check_positive
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.sampling import biases_of, check_sampling, samplings_of, stopping_of, text_options_of
from caravan_dialects.text.assembler import TextOptions
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams as Sampling
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import StoppingParams
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER, text_ids
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend
from caravan_shard.sampling.choice import Choice, choose_token
from caravan_shard.sampling.peaks import has_peak, rows_without_numbers
from caravan_shard.sampling.penalties import make_biases, make_penalties
from caravan_shard.sampling.processors import Processors

LIMITS = Limits(max_stop_sequences=MAX_STOPS)
# Parameters by which a single token cannot be chosen.
NOT_OF_A_TOKEN = ("structured_outputs", "use_beam_search", "min_tokens", "best_of", "mirostat")
# Chooses a token id by the logits [vocabulary], an array of its own that it may change.
CustomSampler = Callable[[NDArray[np.float32]], int]
Sampler = SamplingParams | CustomSampler
Criterion = Callable[[Token], bool]
# A function, or stop strings and ids of stop tokens.
Stop = Criterion | str | int | Sequence[str | int]
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
# These need a scheduler, a constraint or a whole output.
_REFUSED = (
    *NOT_OF_A_TOKEN, "n", "choice_parameters", "logprobs", "prompt_logprobs", "mirostat_tau", "mirostat_eta",
    "adaptive_target", "adaptive_decay", "length_penalty", "early_stopping", "priority", "timeout", "speculate",
    "cache_salt",
)  # fmt: skip


def model_facts(backend: Backend, *, max_tokenize_bytes: int = 0) -> ModelFacts:
    """Return what the rules of sampling, stopping and prompts look at; the rest is not filled in.

    ``max_tokenize_bytes``: of a text; only prompts of messages need it.
    """
    facts, current = backend.facts, backend.capacity.current
    return ModelFacts(
        name=facts.name,
        fingerprint=facts.fingerprint,
        vocabulary_size=facts.vocabulary_size,
        chat_template=facts.chat_template,
        bos_text=facts.bos_text,
        eos_text=facts.eos_text,
        max_sequence_tokens=current.cells_per_sequence,
        max_top_n_tokens=0,
        max_tokenize_bytes=max_tokenize_bytes,
        total_cells=current.cells,
    )


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
        raise LogitsProcessorError.of(processors.error)
    return processed


def _parameters(backend: Backend, params: SamplingParams) -> Sampling:
    for name in NOT_OF_A_TOKEN:
        if getattr(params, name):
            raise RequestError(f"`{name}` is for generations: a single token is not chosen by it")
    model = model_facts(backend)
    with named_refusals():
        fields = generating_fields(params)
        check_sampling(fields)
        biases = biases_of(fields.logit_bias, LIMITS, model)
        (chosen,) = samplings_of(fields, 1, model, alternatives=None, biases=biases)
    if chosen.adaptive_target is not None:
        raise RequestError("`adaptive_target` is for generations: a single token is not chosen by it")
    return chosen


@dataclass(frozen=True, slots=True)
class Ending:
    """When an output ends, and how its tokens become text. ``criterion``: a function of the program, if it has one."""

    stopping: StoppingParams
    text: TextOptions
    criterion: Criterion | None

    def finish(self, token: Token, count: int) -> FinishReason | None:
        """Return why the output ends with ``token``, the last of ``count``; None if it does not."""
        if token.ends and not self.stopping.ignore_eos:
            return FinishReason.EOS_TOKEN
        if token.id in self.stopping.stop_token_ids or (self.criterion is not None and self.criterion(token)):
            return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if count == self.stopping.max_new_tokens else None


def ending_of(backend: Backend, sampler: Sampler, max_tokens: int | None, stop: Stop | None, room: int) -> Ending:
    """Return when an output ends by ``sampler``, if it has parameters, by ``max_tokens`` and by ``stop``.

    ``room``: how many tokens fit. Raises RequestError.
    """
    params = sampler if isinstance(sampler, SamplingParams) else SamplingParams()
    for name in _REFUSED:
        if getattr(params, name) != _DEFAULTS[name]:
            raise RequestError(f"`{name}` is not known to conversations that are stepped by hand: use an LLM")
    criterion = stop if callable(stop) else None
    if stop is not None and not callable(stop):
        params = _with_stop(params, stop)
    most = _max_tokens(params, max_tokens, room)
    with named_refusals():
        fields = generating_fields(params)
        check_positive("max_tokens", params.max_tokens)
        return Ending(stopping_of(fields, most, model_facts(backend)), text_options_of(fields, LIMITS), criterion)


def _max_tokens(params: SamplingParams, given: int | None, room: int) -> int:
    """Return the smaller number of both. Beside a number that is ``given``, the parameters' default says nothing."""
    own = params.max_tokens
    if given is None:
        return room if own is None else own
    return given if own in (None, _DEFAULTS["max_tokens"]) else min(given, own)


def _with_stop(params: SamplingParams, stop: str | int | Sequence[str | int]) -> SamplingParams:
    """Return the parameters with the strings and ids of ``stop`` added to theirs."""
    entries: Iterable[str | int] = [stop] if isinstance(stop, str) or not isinstance(stop, Sequence) else stop
    strings = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    ids = list(params.stop_token_ids or ())
    for entry in entries:
        if isinstance(entry, str):
            strings.append(entry)
        elif hasattr(entry, "__index__"):
            ids.append(index(entry))
        else:
            raise RequestError(f"`stop` must be a function, or strings and token ids. Given: {entry!r:.80}")
    return replace(params, stop=strings or None, stop_token_ids=ids or None)

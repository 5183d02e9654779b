"""How a conversation that is stepped by hand chooses a token, by the rules and with the calls of the server's shard."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from caravan.errors import GenerationError, LogitsProcessorError, RequestError
from caravan.executor_sampling import LIMITS, NOT_OF_A_TOKEN, model_facts
from caravan.request_bodies import generating_fields, named_refusals
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.generation.checks import RANDOM_SEED, draw_seed
from caravan_dialects.api.openai.sampling import biases_of, check_sampling, samplings_of
from caravan_proto.messages.sampling import SamplingParams as Sampling
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER, text_ids
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.logprobs import LogprobRow
from caravan_shard.sampling.peaks import has_peak
from caravan_shard.sampling.penalties import Penalty, make_biases, make_penalties
from caravan_shard.sampling.processors import Processors
from caravan_shard.sampling.sampler import Sampler


class History(NamedTuple):
    """The tokens before the one that is chosen; ``outputs`` says which of them were sampled.

    ``edits`` is another number after tokens were taken away or replaced.
    """

    tokens: Sequence[int]
    outputs: Sequence[bool]
    edits: int


class TokenChooser:
    """Chooses tokens of one conversation by parameters that are checked once."""

    def __init__(self, backend: Backend, sampler: Sampler, params: SamplingParams) -> None:
        """Raises RequestError."""
        self._backend, self._sampler, self._params = backend, sampler, params
        self._parameters = _parameters(backend, params)
        self._biases = make_biases(self._parameters.biases)
        self._penalties: Sequence[Penalty] = ()
        # How much of which history the penalties have counted.
        self._counted, self._edits = 0, -1

    def serves(self, params: SamplingParams) -> bool:
        """Whether ``params`` are the checked ones, and have no list that may have changed since."""
        return params is self._params and not (params.logit_bias or params.samplers or params.logits_processors)

    def choose(self, logits: Floats, history: History, seed: int | None = None) -> int:
        """Choose the token that follows ``history`` from its raw ``logits`` [1, vocabulary], which are not changed.

        ``seed``: instead of that of the parameters.

        Raises LogitsProcessorError, or GenerationError if the logits are NaN or infinite.
        """
        parameters = self._parameters if seed is None else replace(self._parameters, seed=seed)
        self._count(history)
        processed = self._processed(logits[0], history)
        choice = Choice(parameters, len(history.tokens), self._penalties, processed=processed, biases=self._biases)
        # Sampling changes such logits for a while, and a token may read its log probability from them meanwhile.
        row = logits.copy() if choice.changes_logits else logits
        (token,) = self._sampler.choose(row, [choice])
        if not math.isfinite(logits[0, token]) and not has_peak(logits[0]):
            raise _no_logits()
        return token

    def _count(self, history: History) -> None:
        """Let the penalties count the tokens of ``history`` that they have not seen."""
        tokens, outputs, edits = history
        if edits != self._edits or self._counted > len(tokens):
            piece = self._backend.vocabulary.piece
            self._penalties = make_penalties(self._parameters, lambda token: piece(token).data)
            self._counted, self._edits = 0, edits
        start, self._counted = self._counted, len(tokens)
        while self._penalties and start < len(tokens):
            end = start
            while end < len(tokens) and outputs[end] == outputs[start]:
                end += 1
            known = tokens[start:end]
            if max(known) >= FIRST_CELL_NUMBER:
                known = text_ids(known)
            for penalty in self._penalties:
                penalty.add(known, output=outputs[start])
            start = end

    def _processed(self, logits: Floats, history: History) -> Floats | None:
        """Return what the functions of the parameters make of ``logits``; None without functions."""
        if not self._params.logits_processors:
            return None
        if not has_peak(logits):
            raise _no_logits()
        processors = Processors(self._params.logits_processors)
        sampled = [token for token, output in zip(history.tokens, history.outputs, strict=True) if output]
        processed = processors.apply(sampled, logits)
        if processors.error is not None:
            raise LogitsProcessorError.of(processors.error)
        return processed


def _no_logits() -> GenerationError:
    return GenerationError("the model computed no finite logits after these tokens")


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


def new_seed(params: SamplingParams) -> int | None:
    """Return a random seed if ``params`` have none; else None."""
    return draw_seed() if params.seed in (None, RANDOM_SEED) else None


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return ``params`` with a random seed, the same for all tokens, if they have none."""
    seed = new_seed(params)
    return params if seed is None else replace(params, seed=seed)


class KeptLogprobs:
    """Computes the log probabilities of the tokens of one conversation where somebody reads them.

    It keeps no logits for tokens that are gone, and few for those that are not: see `advance`.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._last: weakref.WeakSet[LaterLogprob] = weakref.WeakSet()
        self._older: weakref.WeakSet[LaterLogprob] = weakref.WeakSet()

    def of(self, logits: Floats, token: int) -> "LaterLogprob":
        """Return the log probability of ``token`` under raw ``logits`` [1, vocabulary], which never change."""
        made = LaterLogprob(self._sampler, logits, token)
        self._last.add(made)
        return made

    def advance(self) -> None:
        """Compute those that were made before the last call, unless their tokens are gone.

        A loop over tokens has the last one until it gets the next, and loses it then.
        """
        for one in self._older:
            float(one)
        self._older.clear()
        self._last, self._older = self._older, self._last


class LaterLogprob:
    """The log probability of a token, computed once it is asked for. Any thread may ask."""

    __slots__ = ("__weakref__", "_logits", "_sampler", "_token", "_value")

    def __init__(self, sampler: Sampler, logits: Floats, token: int) -> None:
        self._sampler, self._token = sampler, token
        self._logits: Floats | None = logits
        self._value = 0.0

    def __float__(self) -> float:
        """Return the value, and let go of the logits."""
        logits = self._logits
        if logits is not None:
            (found,) = self._sampler.logprobs(logits, [LogprobRow(0, self._token, 0)])
            # The value is there before the logits are gone: another thread may ask.
            self._value, self._logits = found.chosen, None
        return self._value

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Let a copy be the number."""
        return float, (float(self),)

"""How an output of a conversation that is stepped by hand ends, by the rules of `LLM.generate`."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index

import numpy as np
from numpy.typing import NDArray

from caravan.errors import RequestError
from caravan.options import MAX_STOPS
from caravan.outputs import Token
from caravan.request_bodies import generating_fields, named_refusals
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.generation.checks import check_positive
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.sampling import stopping_of, text_options_of
from caravan_dialects.text.assembler import TextOptions
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import StoppingParams
from caravan_shard.backends.base import Backend

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

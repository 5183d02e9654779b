"""Samples and appends the tokens of a conversation until an output ends, by the rules of `LLM.generate`."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import TYPE_CHECKING

from caravan.errors import CaravanError, RequestError
from caravan.executor_facts import LIMITS, model_facts
from caravan.executor_sampling import NOT_OF_A_TOKEN
from caravan.request_bodies import completion_body
from caravan.sampling_params import SamplingParams
from caravan.token import Token
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.checks import check_positive
from caravan_dialects.api.openai.stopping import stopping_of, text_options_of
from caravan_dialects.text.assembler import Assembler, Piece, TextOptions
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.generation import StoppingParams
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_shard.backends.base import Backend

if TYPE_CHECKING:
    from caravan.conversation import Conversation, Sampler

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


def ending_of(backend: Backend, sampler: "Sampler", max_tokens: int | None, stop: Stop | None, room: int) -> Ending:
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
    body = completion_body("-", params, 1)
    try:
        check_positive("max_tokens", params.max_tokens)
        return Ending(stopping_of(body, most, model_facts(backend)), text_options_of(body, LIMITS), criterion)
    except ValidationError as error:
        raise RequestError(str(error).removeprefix("Input validation error: ")) from None


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


def generation(conversation: "Conversation", sampler: "Sampler", ending: Ending) -> Iterator[Token | None]:
    """Yield the tokens of an output with their texts, and None before each step, so that others may join the step.

    Each is yielded before it is appended, or later if its text might have belonged to a stop string. The one that ends
    the output is not appended, unless it is the last of ``max_new_tokens``.
    """
    assembler, held = Assembler(ending.text), deque[Token]()

    def released(pieces: Sequence[Piece]) -> Iterator[Token]:
        for piece in pieces:
            yield replace(held.popleft(), text=piece.text)

    try:
        for count in range(1, ending.stopping.max_new_tokens + 1):
            yield from conversation.steps()
            token = conversation.sample(sampler)
            held.append(token)
            finish = ending.finish(token, count)
            pieces = assembler.push(GeneratedToken(token.id, token.piece, token.special, token.logprob, (), finish))
            yield from released(pieces)
            if pieces and pieces[-1].finish not in (None, FinishReason.LENGTH):
                return
            conversation.prompt(token)
        yield from conversation.steps()
    except CaravanError:
        yield from released(assembler.flush())
        raise

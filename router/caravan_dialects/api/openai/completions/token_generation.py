"""vLLM's ``/inference/v1/generate``: token ids in, token ids out. It is a completion in another form."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run, collect
from caravan_dialects.api.generation.schema import (
    NEUTRAL,
    CacheSalt,
    ModelName,
    NoEffect,
    OnlyNull,
    Priority,
    SessionId,
    Speculate,
    Timeout,
    Unsupported,
)
from caravan_dialects.api.generation.serving import serving_fields
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.output import chat_logprobs
from caravan_dialects.api.openai.chat.schema import ChatLogprobs
from caravan_dialects.api.openai.completions.reply import AskedCompletions, CompletionsAnswer
from caravan_dialects.api.openai.completions.schema import CompletionRequest, PromptLogprob
from caravan_dialects.api.openai.events import FINISH_WORDS, token_ids_of, wants_usage, wants_usage_of_each
from caravan_dialects.api.openai.rules import needs_field_error
from caravan_dialects.api.openai.schema import LogitBias, SamplingFields, StreamOptions, StructuredOutputs, Usage
from caravan_dialects.api.openai.usage import prompt_details
from caravan_dialects.api.stream import Events
from caravan_dialects.text.assembler import Piece
from caravan_scheduler.core.tokens import GeneratedToken

_ENCODER = msgspec.json.Encoder()
_ALL_THAT_FIT = -1


class TokenSampling(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``SamplingParams``. ``max_tokens``: all that fit by default.

    ``detokenize``: false only with ``output_mode`` "tokens".
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: LogitBias = None
    structured_outputs: StructuredOutputs | None = None
    detokenize: bool | None = None
    spaces_between_special_tokens: NoEffect = None
    output_kind: NoEffect = None
    skip_clone: NoEffect = None
    skip_reading_prefix_cache: Unsupported = None
    flat_logprobs: Unsupported = None
    bad_words: Unsupported = None
    allowed_token_ids: OnlyNull = None
    logprob_token_ids: OnlyNull = None
    truncate_prompt_tokens: OnlyNull = None
    thinking_token_budget: OnlyNull = None
    repetition_detection: OnlyNull = None
    extra_args: Unsupported = None


class TokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``token_ids``: the prompt, such as ``/v1/chat/completions/render`` returns it.

    ``output_mode``: "tokens", the default, or "text", which adds texts. A constraint applies from the first token.
    """

    token_ids: list[int]
    sampling_params: TokenSampling = TokenSampling()
    model: ModelName = None
    request_id: str | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    priority: Priority = None
    timeout: Timeout = None
    speculate: Speculate = None
    token_offsets: NoEffect = None
    reasoning_parser_kwargs: NoEffect = None
    reasoning_ended: Annotated[
        Any, msgspec.Meta(description="Accepted only if it is true or null.", extra={NEUTRAL: (True,)})
    ] = None
    features: OnlyNull = None
    content_parts: Unsupported = None
    kv_transfer_params: OnlyNull = None
    ec_transfer_params: OnlyNull = None


class TokenCandidate(msgspec.Struct, frozen=True):
    """``rank``: 1 for the likeliest token; null for a token beyond the number asked for."""

    token_id: int
    logprob: float | None
    rank: int | None


class GeneratedLogprob(msgspec.Struct, frozen=True):
    """``top_logprobs``: the token itself, then the others by rank."""

    token_id: int
    logprob: float | None
    rank: int | None
    top_logprobs: list[TokenCandidate]


class GeneratedLogprobs(msgspec.Struct, frozen=True):
    content: list[GeneratedLogprob]


class TokensChoice(msgspec.Struct):
    """The token ids of an output, the end token included."""

    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: GeneratedLogprobs | None


class TextChoice(msgspec.Struct):
    """``text``: without a matched stop string, whose tokens are in ``token_ids``."""

    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    text: str


class _Reply(msgspec.Struct, kw_only=True):
    """A reply, or one chunk of a stream, which has no ``model``, ``created`` and ``prompt_logprobs``.

    ``prompt_token_ids``: with ``return_token_ids``, in the first chunk of each choice.
    """

    request_id: str
    model: str | msgspec.UnsetType = msgspec.UNSET
    created: int | msgspec.UnsetType = msgspec.UNSET
    usage: Usage | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    kv_transfer_params: msgspec.UnsetType | None = msgspec.UNSET


class TokensReply(_Reply, tag_field="output_mode", tag="tokens"):
    """A reply to ``output_mode`` "tokens"."""

    choices: list[TokensChoice]


class TextReply(_Reply, tag_field="output_mode", tag="text"):
    """A reply to ``output_mode`` "text"."""

    choices: list[TextChoice]


Generated = TokensReply | TextReply


def completion_of(body: TokensRequest) -> CompletionRequest:
    """Return the completion that generates what ``body`` asks for. Raises ValidationError."""
    given = body.sampling_params
    if body.output_mode == "text" and given.detokenize is False:
        raise needs_field_error("output_mode", "`sampling_params.detokenize` is true", body.output_mode)
    common = (set(TokenSampling.__struct_fields__) & set(CompletionRequest.__struct_fields__)) - {"max_tokens"}
    return CompletionRequest(
        prompt=list(body.token_ids),
        max_tokens=_ALL_THAT_FIT if given.max_tokens is None else given.max_tokens,
        model=body.model,
        stream=body.stream,
        stream_options=body.stream_options,
        **serving_fields(body),
        **{name: getattr(given, name) for name in common},
    )


class AskedTokens(AskedCompletions):
    """The continuation of a prompt of token ids."""

    def __init__(self, body: TokensRequest, limits: Limits, request_id: str) -> None:
        """``request_id``: of a request that names none. Raises ValidationError."""
        super().__init__(completion_of(body), limits, "token_ids")
        self._asked = body
        self._request_id = body.request_id or request_id

    async def validate(self, context: Context) -> "TokensAnswer":
        return TokensAnswer(self._asked, await super().validate(context), self._request_id)


class TokensAnswer(CompletionsAnswer):
    """Choices as token ids."""

    def __init__(self, body: TokensRequest, completions: CompletionsAnswer, request_id: str) -> None:
        super().__init__(completions.body, completions.per_prompt, completions.requests, completions.model)
        self._asked = body
        self._request_id = self.reply_id = request_id

    async def whole(self, runs: Sequence[Run]) -> bytes:
        collected = await collect(runs)
        parts = [(place, collected[index], runs[index]) for place, index in enumerate(self.per_prompt.best(collected))]
        reply = self._reply(parts)
        reply.model, reply.created = self.envelope.model, int(time.time())
        reply.usage = self._usage(runs)
        reply.prompt_logprobs = self._prompt_logprobs(0, runs[0])
        reply.prompt_token_ids = list(runs[0].spec.prompt) if self._asked.return_token_ids else None
        reply.kv_transfer_params = None
        return _ENCODER.encode(reply)

    async def send(self, events: Events, index: int, run: Run) -> None:
        shown = not self._asked.return_token_ids
        async for ready in run:
            messages = []
            for pieces in ready:
                reply = self._reply([(index, pieces, run)])
                if not shown:
                    shown, reply.prompt_token_ids = True, list(run.spec.prompt)
                if wants_usage_of_each(self._asked.stream_options):
                    prompt = len(run.spec.prompt)
                    reply.usage = Usage(prompt, run.tokens, prompt + run.tokens, prompt_details(run))
                messages.append(_ENCODER.encode(reply))
            await events.send(*messages)

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        if not wants_usage(self._asked.stream_options):
            return None
        reply = self._reply([])
        reply.usage = self._usage(runs)
        return _ENCODER.encode(reply)

    def _reply(self, parts: Sequence[tuple[int, Sequence[Piece], Run]]) -> Generated:
        """Return a reply with a choice of each of ``parts``: its index, and pieces of its run."""
        name, wanted = self._request_id, self._asked.sampling_params.logprobs
        if self._asked.output_mode == "text":
            return TextReply(
                request_id=name, choices=[_text_choice(*part, logprobs=wanted is not None) for part in parts]
            )
        return TokensReply(request_id=name, choices=[_tokens_choice(*part, wanted) for part in parts])


def _finish(pieces: Sequence[Piece], run: Run) -> str | None:
    finish = pieces[-1].finish if pieces else run.finish
    return None if finish is None else FINISH_WORDS[finish]


def _text_choice(index: int, pieces: Sequence[Piece], run: Run, *, logprobs: bool) -> TextChoice:
    text = "".join(piece.text for piece in pieces)
    shown = chat_logprobs(pieces) if logprobs else None
    return TextChoice(index, _finish(pieces, run), token_ids_of(pieces), shown, text)


def _tokens_choice(index: int, pieces: Sequence[Piece], run: Run, wanted: int | None) -> TokensChoice:
    """``wanted``: how many alternatives were asked for; None for no logprobs."""
    shown = None if wanted is None else GeneratedLogprobs([_logprob(piece.token, wanted) for piece in pieces])
    return TokensChoice(index, _finish(pieces, run), token_ids_of(pieces), shown)


def _logprob(token: GeneratedToken, most: int) -> GeneratedLogprob:
    """``most``: the number of alternatives that were asked for."""
    ranked = [
        TokenCandidate(other.token_id, other.logprob, rank) for rank, other in enumerate(token.alternatives[:most], 1)
    ]
    rank = next((other.rank for other in ranked if other.token_id == token.token_id), None)
    chosen = TokenCandidate(token.token_id, token.logprob, rank)
    others = [other for other in ranked if other.token_id != token.token_id]
    return GeneratedLogprob(token.token_id, token.logprob, rank, [chosen, *others] if most else [])

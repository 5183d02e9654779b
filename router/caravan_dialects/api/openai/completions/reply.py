"""Replies of ``/v1/completions``, whole and streamed."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run, ValidRequest, collect
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.aliases import with_one_name
from caravan_dialects.api.openai.choices import Choices
from caravan_dialects.api.openai.completions.schema import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    Logprobs,
    PromptLogprob,
)
from caravan_dialects.api.openai.completions.validation import completion_plan_of, validate_completion
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.events import (
    EVENTS_UNTIL_DONE,
    FINISH_WORDS,
    token_ids_of,
    wants_usage,
    wants_usage_of_each,
)
from caravan_dialects.api.openai.schema import PromptTokensDetails, Usage
from caravan_dialects.api.openai.usage import completion_details, prompt_details, timings_of
from caravan_dialects.api.stream import Events
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import PromptText, display_text
from caravan_proto.messages.adapters import adapter_name
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.prompt_media import text_ids
from caravan_scheduler.core.tokens import Alternative, PromptToken

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as it precedes a choice's text. ``logprobs``: None if the client wants none."""

    text: str
    logprobs: Logprobs | None


def choice_of(
    index: int, pieces: Sequence[Piece], finish: FinishReason | None, logprobs: int | None, before: Echo | int
) -> CompletionChoice:
    """Return a whole choice, or the next part of a streamed one.

    ``logprobs``: how many alternatives were asked for; None for no logprobs. ``before``: the echoed prompt at the start
    of a choice, else how many characters of the choice's text came before.
    """
    echo = before if isinstance(before, Echo) else None
    offset = before if isinstance(before, int) else len(before.text)
    choice = CompletionChoice(
        index=index,
        text="".join([piece.text for piece in pieces]),
        logprobs=None if logprobs is None else _logprobs(pieces, offset, logprobs),
        finish_reason=None if finish is None else FINISH_WORDS[finish],
    )
    if echo is not None:
        choice.text = echo.text + choice.text
        if choice.logprobs is not None and echo.logprobs is not None:
            choice.logprobs = _joined(echo.logprobs, choice.logprobs)
    return choice


def echo_of(prompt: PromptText, entries: Sequence[PromptToken], logprobs: int | None) -> Echo:
    """``entries``: one per prompt token if ``logprobs`` were asked for."""
    if logprobs is None:
        return Echo(prompt.text, None)
    offsets, offset = [], 0
    for text in prompt.texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        # The first token follows nothing: it has no probability.
        None if entry.logprob is None else _top_logprobs(piece, entry.logprob, entry.alternatives[:logprobs])
        for piece, entry in zip(prompt.tokenized.pieces, entries, strict=True)
    ]
    return Echo(
        prompt.text,
        Logprobs(
            tokens=list(prompt.texts),
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=tops if logprobs else None,
            text_offset=offsets,
        ),
    )


def prompt_logprobs_of(
    prompt: PromptText, entries: Sequence[PromptToken], top: int
) -> list[dict[str, PromptLogprob] | None]:
    """Return vLLM's ``prompt_logprobs``: per token the ``top`` likeliest and the actual one; None for the first."""
    columns = zip(prompt.tokenized.token_ids, prompt.tokenized.pieces, entries, strict=True)
    return [_prompt_logprob(token_id, piece, entry, top) for token_id, piece, entry in columns]


def _prompt_logprob(token_id: int, piece: bytes, entry: PromptToken, top: int) -> dict[str, PromptLogprob] | None:
    if entry.logprob is None:
        return None
    by_id = {
        str(other.token_id): PromptLogprob(other.logprob, rank, display_text(other.piece))
        for rank, other in enumerate(entry.alternatives[:top], 1)
    }
    by_id.setdefault(str(token_id), PromptLogprob(entry.logprob, None, display_text(piece)))
    return by_id


def _joined(first: Logprobs, second: Logprobs) -> Logprobs:
    tops = None if second.top_logprobs is None else (first.top_logprobs or []) + second.top_logprobs
    return Logprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=tops,
        text_offset=first.text_offset + second.text_offset,
    )


def _logprobs(pieces: Sequence[Piece], offset: int, top: int) -> Logprobs:
    """Return columns for ``pieces``, whose text begins at ``offset`` of the choice's text.

    ``top_logprobs`` has the ``top`` likeliest tokens and the chosen one, as in OpenAI's API; null if ``top`` is 0.
    """
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece.text)
    tops = [_top_logprobs(piece.token.piece, piece.token.logprob, piece.token.alternatives[:top]) for piece in pieces]
    return Logprobs(
        tokens=[piece.text for piece in pieces],
        token_logprobs=[piece.token.logprob for piece in pieces],
        top_logprobs=[*tops] if top else None,
        text_offset=offsets,
    )


def _top_logprobs(token: bytes, logprob: float | None, alternatives: Iterable[Alternative]) -> dict[str, float]:
    top = {display_text(other.piece): other.logprob for other in alternatives}
    if logprob is not None:
        top.setdefault(display_text(token), logprob)
    return top


class AskedCompletions(Asked):
    """Completions of one or several prompts.

    Errors that are found before a stream starts have their real status, as OpenAI and vLLM have it.
    """

    dialect = OPENAI
    framing = EVENTS_UNTIL_DONE

    def __init__(self, body: CompletionRequest, limits: Limits, prompt_field: str = "prompt") -> None:
        """``prompt_field``: what the client calls the prompt. Raises ValidationError."""
        body = with_one_name(body)
        self._body = body
        self.model = body.model
        self._plan = completion_plan_of(body, limits, prompt_field)
        self.streamed = bool(body.stream)
        self.generations = len(self._plan.prompts) * self._plan.choices.candidates

    async def validate(self, context: Context) -> "CompletionsAnswer":
        requests = await validate_completion(context, self._body, self._plan)
        return CompletionsAnswer(self._body, self._plan.choices, requests, context.model)


class CompletionsAnswer(Answer):
    """Choices of each prompt, in the order of the prompts."""

    def __init__(
        self, body: CompletionRequest, per_prompt: Choices, requests: Sequence[ValidRequest], model: ModelFacts
    ) -> None:
        super().__init__(requests)
        self.body = body
        self.per_prompt = per_prompt
        self.model = model
        self.envelope = Completion(
            id=f"cmpl-{time.time_ns():x}",
            object="text_completion",
            created=int(time.time()),
            model=adapter_name(requests[0].specs[0].adapter) or model.name,
            system_fingerprint=model.digest,
            choices=[],
        )
        if body.stream and wants_usage(body.stream_options):
            self.envelope.usage = None

    async def whole(self, runs: Sequence[Run]) -> bytes:
        collected = await collect(runs)
        for first in range(0, len(runs), self.per_prompt.candidates):
            self._add_choices(first, runs, collected)
        self.envelope.usage = self._usage(runs)
        if self.body.timings_per_token:
            self.envelope.timings = timings_of(runs[0], self._tokens(runs[0]))
        return _ENCODER.encode(self.envelope)

    def _add_choices(self, first: int, runs: Sequence[Run], collected: Sequence[Sequence[Piece]]) -> None:
        """Add the choices of the prompt whose candidates start at ``first``."""
        candidates = collected[first : first + self.per_prompt.candidates]
        # The first candidate computed the prompt's logprobs for all.
        before, prompt_logprobs = self._echo(first, runs[first]), self._prompt_logprobs(first, runs[first])
        choices = self.envelope.choices
        for index in self.per_prompt.best(candidates):
            choice = self._choice(len(choices), candidates[index], runs[first + index].finish, before)
            choice.prompt_logprobs = prompt_logprobs
            choice.prompt_token_ids = text_ids(runs[first].spec.prompt) if self.body.return_token_ids else None
            choices.append(choice)

    async def send(self, events: Events, index: int, run: Run) -> None:
        before: Echo | int | None = None
        async for ready in run:
            messages = []
            for pieces in ready:
                choice = self._choice(
                    index, pieces, pieces[-1].finish, self._echo(index, run) if before is None else before
                )
                if before is None and self.body.return_token_ids:
                    choice.prompt_token_ids = text_ids(run.spec.prompt)
                before = (before if isinstance(before, int) else 0) + len(choice.text)
                # An incomplete character or a control token has no text to send.
                if choice.text or choice.finish_reason is not None or choice.logprobs is not None or choice.token_ids:
                    # All choices share one envelope: it is encoded before another choice can change it.
                    self.envelope.choices = [choice]
                    self._note_progress(run)
                    messages.append(_ENCODER.encode(self.envelope))
            await events.send(*messages)

    def _note_progress(self, run: Run) -> None:
        """Let the next chunk tell how many tokens of ``run`` there are, and how long they took, if it is asked for."""
        if wants_usage_of_each(self.body.stream_options):
            prompt, output = len(run.spec.prompt), self._tokens(run)
            self.envelope.usage = Usage(prompt, output, prompt + output, prompt_details(run))
        if self.body.timings_per_token:
            self.envelope.timings = timings_of(run, self._tokens(run))

    def _tokens(self, run: Run) -> int:
        return 0 if self.body.max_tokens == 0 else run.tokens

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        if not wants_usage(self.body.stream_options):
            return None
        self.envelope.choices = []
        self.envelope.timings = msgspec.UNSET
        self.envelope.usage = self._usage(runs)
        return _ENCODER.encode(self.envelope)

    def _choice(
        self, index: int, pieces: Sequence[Piece], finish: FinishReason | None, before: Echo | int
    ) -> CompletionChoice:
        # A step always yields a token. A request for no tokens discards it.
        if self.body.max_tokens == 0:
            pieces, finish = (), FinishReason.LENGTH
        choice = choice_of(index, pieces, finish, self.body.logprobs, before)
        if self.body.return_token_ids:
            choice.token_ids = token_ids_of(pieces)
        return choice

    def _echo(self, index: int, run: Run) -> Echo | int:
        """Return what precedes the text of run ``index``. ``run``: one of the same prompt that has its first token."""
        prompt = self.requests[index // self.per_prompt.candidates].prompt_text
        if prompt is None or not self.body.echo:
            return 0
        return echo_of(prompt, run.prompt_logprobs, self.body.logprobs)

    def _prompt_logprobs(self, index: int, run: Run) -> list[dict[str, PromptLogprob] | None] | None:
        """Return vLLM's field; ``index`` and ``run`` as for `_echo`."""
        prompt = self.requests[index // self.per_prompt.candidates].prompt_text
        if prompt is None or self.body.prompt_logprobs is None:
            return None
        return prompt_logprobs_of(prompt, run.prompt_logprobs, self.body.prompt_logprobs)

    def _usage(self, runs: Sequence[Run]) -> Usage:
        prompt = sum(len(request.prompt) for request in self.requests)
        output = sum(self._tokens(run) for run in runs)
        # The first candidate computes the prompt, and the others share the result.
        cached = sum(run.cached_tokens for run in runs[:: self.per_prompt.candidates])
        return Usage(prompt, output, prompt + output, PromptTokensDetails(cached), completion_details(runs))

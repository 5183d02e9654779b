"""Replies of llama-server's ``/completion`` and ``/infill``, whole and streamed."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.progress import PromptProgress, with_progress
from caravan_dialects.api.generation.run import Run, ValidRequest, read_all
from caravan_dialects.api.llama_server.errors import LLAMA_SERVER
from caravan_dialects.api.llama_server.prompts import Prompts
from caravan_dialects.api.llama_server.schema import (
    LlamaCompletion,
    LlamaServerFields,
    TokenProbabilities,
    TokenProbability,
)
from caravan_dialects.api.llama_server.validation import sampling_of, validate_llama
from caravan_dialects.api.openai.usage import progress_shown, timings_at, timings_of
from caravan_dialects.api.stream import Events
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import display_text
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import DEFAULTS, RANGES, RequestDefaults
from caravan_scheduler.core.tokens import Alternative, GeneratedToken

_ENCODER = msgspec.json.Encoder()
_STOP_TYPES = {
    FinishReason.LENGTH: "limit",
    FinishReason.EOS_TOKEN: "eos",
    FinishReason.STOP_TOKEN: "eos",
    FinishReason.STOP_SEQUENCE: "word",
}


class LineLimits:
    """Watches an output for the ends that llama-server's ``n_indent`` and ``t_max_predict_ms`` mean.

    ``indent``: from the second line on, the output ends at the first line that is indented by fewer spaces and tabs; 0
    for no such end. ``seconds``: the output ends at the first line end that comes later after the first token; 0 for no
    such end.
    """

    def __init__(self, indent: int, seconds: float) -> None:
        self._indent = indent
        self._seconds = seconds
        self._began = 0.0
        # Spaces and tabs at the start of the line so far; None behind them, and in the first line.
        self._leading: int | None = None
        self.has_new_line = False
        self.ended = False

    def take(self, text: str) -> str:
        """Return what of the next ``text`` belongs to the output, and set ``ended`` if it ends there."""
        if not self._began:
            self._began = time.monotonic()
        if not self._indent and "\n" not in text:
            return text
        is_late = self._seconds > 0 and time.monotonic() - self._began > self._seconds
        for place, character in enumerate(text):
            if self._leading is not None:
                if character in " \t":
                    self._leading += 1
                    continue
                if self._leading < self._indent:
                    self.ended = True
                    return text[:place]
                self._leading = None
            if character == "\n":
                self.has_new_line = True
                self._leading = 0
                if is_late:
                    self.ended = True
                    return text[: place + 1]
        return text


class _Output:
    """Collects the text and tokens of one generation: all so far, or those since the last event."""

    def __init__(self, body: LlamaServerFields, run: Run) -> None:
        self._run = run
        self._discards = body.n_predict == 0
        self._wants_probabilities = bool(body.n_probs)
        self.lines = LineLimits(body.n_indent or 0, max(0, body.t_max_predict_ms or 0) / 1000)
        self.text = ""
        self.token_ids: list[int] = []
        self.probabilities: list[TokenProbabilities] = []

    def take(self, pieces: Sequence[Piece]) -> None:
        """Add ``pieces``, and end the generation where editors want it to end."""
        if self._discards:
            return
        for piece in pieces:
            self.text += self.lines.take(piece.text)
            self.token_ids.append(piece.token.token_id)
            if self._wants_probabilities:
                self.probabilities.append(_probabilities(piece.token))
            if self.lines.ended:
                self._run.end()
                return

    def take_part(self) -> tuple[str, list[int], list[TokenProbabilities]]:
        """Return what has been added since the last call."""
        part = self.text, self.token_ids, self.probabilities
        self.text, self.token_ids, self.probabilities = "", [], []
        return part

    @property
    def stop_type(self) -> str:
        """The reason why the output ended."""
        if self.lines.ended or self._discards or self._run.finish is None:
            return "limit"
        return _STOP_TYPES[self._run.finish]

    @property
    def tokens(self) -> int:
        """The number of tokens that were generated, but for one that was not wanted."""
        return 0 if self._discards else self._run.tokens


class AskedLlamaServer(Asked):
    """Completions of one or several prompts, or of what is around a gap."""

    dialect = LLAMA_SERVER

    def __init__(
        self, body: LlamaServerFields, prompts: int, n: int, read: Callable[[Context], Awaitable[Prompts]]
    ) -> None:
        """``read`` tokenizes the body's ``prompts``; raises ValidationError. ``n``: completions of each."""
        self._body = body
        self._n = n
        self._read = read
        self.model = body.model
        self.streamed = bool(body.stream)
        self.generations = prompts * n

    async def validate(self, context: Context) -> "LlamaServerAnswer":
        prompts = await self._read(context)
        requests = await validate_llama(context, self._body, prompts, self._n)
        texts = [""] * len(prompts.tokens)
        if not self._body.response_fields or "prompt" in self._body.response_fields:
            texts = [await _text(context, tokens) for tokens in prompts.tokens]
        shown = _Shown(model=context.adapter or context.model.name, prompts=texts, truncated=prompts.truncated)
        return LlamaServerAnswer(self._body, self._n, requests, shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What replies tell of the request. ``truncated``: whether texts around a gap were cut."""

    model: str
    prompts: Sequence[str]
    truncated: bool


class LlamaServerAnswer(Answer):
    """A reply for each prompt and each of its completions; a list if there are several."""

    def __init__(self, body: LlamaServerFields, n: int, requests: Sequence[ValidRequest], shown: _Shown) -> None:
        """``n``: completions of each prompt."""
        super().__init__(requests)
        self._body = body
        self._n = n
        self._shown = shown

    async def whole(self, runs: Sequence[Run]) -> bytes:
        outputs = [_Output(self._body, run) for run in runs]
        await read_all(runs, [output.take for output in outputs])
        replies = [
            self._last(index, run, output, output.take_part())
            for index, (run, output) in enumerate(zip(runs, outputs, strict=True))
        ]
        return _ENCODER.encode(replies[0] if len(replies) == 1 else replies)

    async def send(self, events: Events, index: int, run: Run) -> None:
        output = _Output(self._body, run)

        async def tell(progress: PromptProgress) -> None:
            event = self._part(index, run, output, ("", [], []))
            event.prompt_progress = progress_shown(progress)
            if self._body.timings_per_token:
                event.timings = timings_at(progress)
            await events.send(_ENCODER.encode(event))

        async for ready in with_progress(run, tell) if self._body.return_progress else run:
            messages = []
            for pieces in ready:
                output.take(pieces)
                text, token_ids, probabilities = output.take_part()
                if text or token_ids:
                    part = self._part(index, run, output, (text, token_ids, probabilities))
                    messages.append(_ENCODER.encode(part))
            await events.send(*messages)
        await events.send(_ENCODER.encode(self._last(index, run, output, ("", [], []))))

    def _part(
        self, index: int, run: Run, output: _Output, part: tuple[str, list[int], list[TokenProbabilities]]
    ) -> LlamaCompletion:
        text, token_ids, probabilities = part
        shows_tokens = bool(self._body.stream) or bool(self._body.return_tokens)
        reply = LlamaCompletion(
            index=index,
            content=text,
            tokens=token_ids if shows_tokens else [],
            stop=False,
            id_slot=-1,
            tokens_predicted=output.tokens,
            tokens_evaluated=len(run.spec.prompt),
        )
        if probabilities:
            reply.completion_probabilities = probabilities
        if self._body.timings_per_token and output.tokens:
            reply.timings = timings_of(run, output.tokens)
        return reply

    def _last(
        self, index: int, run: Run, output: _Output, part: tuple[str, list[int], list[TokenProbabilities]]
    ) -> LlamaCompletion | dict[str, Any]:
        """Return a whole reply, or the last event of a stream."""
        reply = self._part(index, run, output, part)
        reply.stop = True
        reply.model = self._shown.model
        reply.generation_settings = _settings(self._body, run)
        reply.prompt = self._shown.prompts[index // self._n]
        reply.has_new_line = output.lines.has_new_line
        reply.truncated = self._shown.truncated
        reply.stop_type = output.stop_type
        reply.stopping_word = run.stop_string if reply.stop_type == "word" else ""
        reply.tokens_cached = run.cached_tokens
        reply.timings = timings_of(run, output.tokens)
        fields = self._body.response_fields
        return _picked(msgspec.to_builtins(reply), fields) if fields else reply


def _picked(reply: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the ``fields`` of ``reply`` that it has; "a/b" is field ``b`` of ``a``, under this name."""
    picked = {}
    for path in fields:
        value: Any = reply
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            picked[path] = value
    return picked


async def _text(context: Context, tokens: Sequence[int]) -> str:
    pieces = (await context.engine.queries.detokenize(tokens)).pieces
    return b"".join(pieces).decode(errors="replace")


def _settings(body: LlamaServerFields, run: Run) -> dict[str, Any]:
    """Return how the output was generated, by llama-server's names."""
    sampling, stopping = run.spec.sampling, run.spec.stopping
    return {
        "n_predict": -1 if body.n_predict is None else body.n_predict,
        **{name: _shown(name, getattr(sampling, name)) for name in RANGES if name != "repetition_penalty"},
        "repeat_penalty": sampling.repetition_penalty,
        "samplers": list(sampling.samplers),
        "n_probs": body.n_probs or 0,
        "ignore_eos": stopping.ignore_eos,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        "stream": bool(body.stream),
    }


def usual_settings(defaults: RequestDefaults, max_tokens: int | None) -> dict[str, Any]:
    """Return what requests get that do not say it, by llama-server's names. ``max_tokens``: None for all that fit."""
    usual = {name: value for name, value in sampling_of(LlamaServerFields(), defaults).items() if value is not None}
    sampling: dict[str, Any] = {**DEFAULTS, **usual}
    return {
        "n_predict": -1 if max_tokens is None else max_tokens,
        **{name: _shown(name, sampling[name]) for name in RANGES if name not in {"repetition_penalty", "seed"}},
        "repeat_penalty": sampling["repetition_penalty"],
        "samplers": sampling["samplers"],
    }


def _shown(name: str, value: float | None) -> float | None:
    """Return the value of a parameter as llama-server writes it."""
    return RANGES[name].least if value is None else value


def _probabilities(token: GeneratedToken) -> TokenProbabilities:
    assert token.logprob is not None, "a request with n_probs asks for logprobs"
    return TokenProbabilities(
        token.token_id,
        display_text(token.piece),
        list(token.piece),
        token.logprob,
        [_probability(other) for other in token.alternatives],
    )


def _probability(other: Alternative) -> TokenProbability:
    return TokenProbability(other.token_id, display_text(other.piece), list(other.piece), other.logprob)

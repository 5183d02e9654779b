"""Replies of llama-server's ``/completion`` and ``/infill``, whole and streamed."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import Alternative, GeneratedToken
from caravan_router.http.generation.answer import Reply
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run, read_all
from caravan_router.http.llama_server.line_limits import LineLimits
from caravan_router.http.llama_server.prompts import Prompts
from caravan_router.http.llama_server.schema import (
    LlamaCompletion,
    LlamaServerFields,
    Timings,
    TokenProbabilities,
    TokenProbability,
)
from caravan_router.http.llama_server.validation import validate_llama
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.server.event_stream import EventStream
from caravan_router.text.assembler import Piece
from caravan_router.text.detokenize import display_text

_ENCODER = msgspec.json.Encoder()
_STOP_TYPES = {
    FinishReason.LENGTH: "limit",
    FinishReason.EOS_TOKEN: "eos",
    FinishReason.STOP_TOKEN: "eos",
    FinishReason.STOP_SEQUENCE: "word",
}


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


class LlamaServerReply(Reply):
    """A reply for each prompt and each of its completions; a list if there are several."""

    dialect = OPENAI

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

    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        prompts = await self._read(context)
        self._truncated = prompts.truncated
        self._valid = await validate_llama(context, self._body, prompts, self._n)
        self._name = context.adapter or context.model.name
        self._texts = [""] * len(prompts.tokens)
        if self._body.response_fields is None or "prompt" in self._body.response_fields:
            self._texts = [await _text(context, tokens) for tokens in prompts.tokens]
        return self._valid

    async def whole(self, runs: Sequence[Run]) -> bytes:
        outputs = [_Output(self._body, run) for run in runs]
        await read_all(runs, [output.take for output in outputs])
        replies = [
            self._last(index, run, output, output.take_part())
            for index, (run, output) in enumerate(zip(runs, outputs, strict=True))
        ]
        return _ENCODER.encode(replies[0] if len(replies) == 1 else replies)

    async def send(self, events: EventStream, index: int, run: Run) -> None:
        output = _Output(self._body, run)
        async for ready in run:
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
        shows_tokens = self.streamed or bool(self._body.return_tokens)
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
        return reply

    def _last(
        self, index: int, run: Run, output: _Output, part: tuple[str, list[int], list[TokenProbabilities]]
    ) -> LlamaCompletion | dict[str, Any]:
        """Return a whole reply, or the last event of a stream."""
        reply = self._part(index, run, output, part)
        reply.stop = True
        reply.model = self._name
        reply.generation_settings = _settings(self._body, run)
        reply.prompt = self._texts[index // self._n]
        reply.has_new_line = output.lines.has_new_line
        reply.truncated = self._truncated
        reply.stop_type = output.stop_type
        reply.stopping_word = run.stop_string if reply.stop_type == "word" else ""
        reply.tokens_cached = run.cached_tokens
        reply.timings = _timings(run, output.tokens)
        fields = self._body.response_fields
        return reply if fields is None else _picked(msgspec.to_builtins(reply), fields)


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
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": -1 if sampling.repeat_last_n is None else sampling.repeat_last_n,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "xtc_probability": sampling.xtc_probability,
        "n_probs": body.n_probs or 0,
        "ignore_eos": stopping.ignore_eos,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        "stream": bool(body.stream),
    }


def _timings(run: Run, predicted: int) -> Timings:
    times, timings = run.times, run.timings()
    prompt_s = 0.0 if times.started is None or times.first_token is None else times.first_token - times.started
    predicted_s = max(0.0, timings.inference_s - prompt_s)
    computed = len(run.spec.prompt) - run.cached_tokens
    return Timings(
        cache_n=run.cached_tokens,
        prompt_n=computed,
        prompt_ms=1000 * prompt_s,
        prompt_per_token_ms=1000 * prompt_s / max(1, computed),
        prompt_per_second=computed / prompt_s if prompt_s else 0.0,
        predicted_n=predicted,
        predicted_ms=1000 * predicted_s,
        predicted_per_token_ms=1000 * predicted_s / max(1, predicted),
        predicted_per_second=predicted / predicted_s if predicted_s else 0.0,
    )


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

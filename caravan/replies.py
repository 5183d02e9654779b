"""Turns the pieces of generations into outputs."""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from caravan.outputs import CompletionOutput, Logprob, ToolCall
from caravan_router.chat.thought_reader import ThoughtPart
from caravan_router.chat.tool_parser import CallPart, TextPart
from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import GeneratedToken, PromptToken
from caravan_router.http.generation.run import Run
from caravan_router.http.openai.chat.output import ChatOutput, WholeOutput, new_call_id
from caravan_router.http.openai.events import FINISH_WORDS, token_ids_of
from caravan_router.text.assembler import Piece
from caravan_router.text.detokenize import display_text
from caravan_router.text.prompt_text import PromptText


def completion_output(
    index: int, pieces: Sequence[Piece], run: Run, *, logprobs: int | None, stops: Sequence[str] = ()
) -> CompletionOutput:
    """Return an output with ``pieces``: all of them, or in a stream the next ones. ``stops``: its stop strings.

    ``logprobs``: how many alternatives each token has; None for no log probabilities.
    """
    finish = run.finish
    return CompletionOutput(
        index=index,
        text="".join(piece.text for piece in pieces),
        token_ids=token_ids_of(pieces),
        cumulative_logprob=None if logprobs is None else _cumulative(pieces),
        logprobs=None if logprobs is None else [_token_logprobs(piece.token, logprobs) for piece in pieces],
        finish_reason=None if finish is None else FINISH_WORDS[finish],
        stop_reason=_stop_reason(pieces, finish, stops),
    )


def _cumulative(pieces: Sequence[Piece]) -> float:
    return sum(piece.token.logprob or 0.0 for piece in pieces)


def _stop_reason(pieces: Sequence[Piece], finish: FinishReason | None, stops: Sequence[str]) -> int | str | None:
    if finish is FinishReason.STOP_TOKEN and pieces:
        return pieces[-1].token.token_id
    if finish is not FinishReason.STOP_SEQUENCE:
        return None
    # The last tokens completed the stop string, which the text may lack.
    text = display_text(b"".join(piece.token.piece for piece in pieces))
    return max((stop for stop in stops if stop in text), key=lambda stop: text.rfind(stop) + len(stop), default=None)


def _token_logprobs(token: GeneratedToken, top: int) -> dict[int, Logprob]:
    """Return ``top`` alternatives of a token, likeliest first, and the token itself."""
    found = {
        other.token_id: Logprob(other.logprob, rank, display_text(other.piece))
        for rank, other in enumerate(token.alternatives[:top], 1)
    }
    if token.logprob is not None:
        found.setdefault(token.token_id, Logprob(token.logprob, None, display_text(token.piece)))
    return found


def prompt_logprobs(prompt: PromptText, entries: Sequence[PromptToken], top: int) -> list[dict[int, Logprob] | None]:
    """Return for each token of a prompt the ``top`` likeliest and the actual one; None for the first."""
    columns = zip(prompt.tokenized.token_ids, prompt.tokenized.pieces, entries, strict=True)
    return [_prompt_logprob(token_id, piece, entry, top) for token_id, piece, entry in columns]


def _prompt_logprob(token_id: int, piece: bytes, entry: PromptToken, top: int) -> dict[int, Logprob] | None:
    if entry.logprob is None:
        return None
    found = {
        other.token_id: Logprob(other.logprob, rank, display_text(other.piece))
        for rank, other in enumerate(entry.alternatives[:top], 1)
    }
    found.setdefault(token_id, Logprob(entry.logprob, None, display_text(piece)))
    return found


def chat_output(index: int, whole: WholeOutput, *, logprobs: int | None) -> CompletionOutput:
    """Return the whole output of a chat."""
    message, plain = whole.message(), completion_output(index, whole.pieces, whole.run, logprobs=logprobs)
    thought = message.reasoning_content
    calls = [] if message.tool_calls is msgspec.UNSET else message.tool_calls
    return CompletionOutput(
        index=index,
        text=message.content or "",
        token_ids=plain.token_ids,
        cumulative_logprob=plain.cumulative_logprob,
        logprobs=plain.logprobs,
        finish_reason=whole.finish,
        stop_reason=whole.output.stop or plain.stop_reason,
        reasoning="" if thought is msgspec.UNSET or thought is None else thought,
        tool_calls=[ToolCall(call.id, call.function.name, call.function.arguments) for call in calls],
    )


class ChatParts:
    """Makes the parts of one streamed output of a chat. Tool calls are in the last one, whole."""

    def __init__(self, index: int, output: ChatOutput, run: Run, *, logprobs: int | None) -> None:
        self._index = index
        self._output = output
        self._run = run
        self._logprobs = logprobs
        self._calls: list[tuple[str, list[str]]] = []

    def push(self, pieces: Sequence[Piece]) -> CompletionOutput:
        """Return the part that ``pieces`` make, and end the run when the output needs no more."""
        text, thought = "", ""
        for part in self._output.push(pieces, self._run.finish):
            match part:
                case ThoughtPart():
                    thought += part.text
                case TextPart():
                    text += part.text
                case CallPart():
                    if part.name is not None:
                        self._calls.append((part.name, []))
                    self._calls[part.index][1].append(part.arguments)
                case _:
                    assert_never(part)
        if not self._output.wanted:
            self._run.end()
        plain = completion_output(self._index, pieces, self._run, logprobs=self._logprobs)
        finish = self._output.finish
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=plain.token_ids,
            cumulative_logprob=plain.cumulative_logprob,
            logprobs=plain.logprobs,
            finish_reason=finish,
            stop_reason=self._output.stop or plain.stop_reason,
            reasoning=thought,
            tool_calls=[]
            if finish is None
            else [ToolCall(new_call_id(), name, "".join(arguments)) for name, arguments in self._calls],
        )

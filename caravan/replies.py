"""Turns the pieces of generations into outputs."""

from collections.abc import Sequence
from dataclasses import replace

from caravan.outputs import CompletionOutput, Logprob, ToolCall
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.chat.output import ChatOutput, Collected, WholeOutput
from caravan_dialects.api.openai.events import FINISH_WORDS, new_call_id, token_ids_of
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import PromptText, display_text
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken


def completion_output(
    index: int, pieces: Sequence[Piece], run: Run, *, logprobs: int | None, stops: Sequence[str] = ()
) -> CompletionOutput:
    """Return an output with ``pieces``: all of them, or in a stream the next ones. ``stops``: its stop strings.

    ``logprobs``: how many alternatives each token has; None for no log probabilities.
    """
    finish, tokens = run.finish, [piece.token for piece in pieces]
    return CompletionOutput(
        index=index,
        text="".join(piece.text for piece in pieces),
        token_ids=token_ids_of(pieces),
        cumulative_logprob=None if logprobs is None else sum(token.logprob or 0.0 for token in tokens),
        logprobs=None
        if logprobs is None
        else [_logprobs(token, token.token_id, token.piece, logprobs) for token in tokens],
        finish_reason=None if finish is None else FINISH_WORDS[finish],
        stop_reason=_stop_reason(pieces, finish, stops),
    )


def _stop_reason(pieces: Sequence[Piece], finish: FinishReason | None, stops: Sequence[str]) -> int | str | None:
    if finish is FinishReason.STOP_TOKEN and pieces:
        return pieces[-1].token.token_id
    if finish is not FinishReason.STOP_SEQUENCE:
        return None
    # The last tokens completed the stop string, which the text may lack.
    text = display_text(b"".join(piece.token.piece for piece in pieces))
    return max((stop for stop in stops if stop in text), key=lambda stop: text.rfind(stop) + len(stop), default=None)


def _logprobs(entry: GeneratedToken | PromptToken, token_id: int, piece: bytes, top: int) -> dict[int, Logprob]:
    """Return ``top`` alternatives of a token, likeliest first, and the token itself."""
    found = {
        other.token_id: Logprob(other.logprob, rank, display_text(other.piece))
        for rank, other in enumerate(entry.alternatives[:top], 1)
    }
    if entry.logprob is not None:
        found.setdefault(token_id, Logprob(entry.logprob, None, display_text(piece)))
    return found


def prompt_logprobs(prompt: PromptText, entries: Sequence[PromptToken], top: int) -> list[dict[int, Logprob] | None]:
    """Return for each token of a prompt the ``top`` likeliest and the actual one; None for the first."""
    columns = zip(prompt.tokenized.token_ids, prompt.tokenized.pieces, entries, strict=True)
    return [
        None if entry.logprob is None else _logprobs(entry, token_id, piece, top) for token_id, piece, entry in columns
    ]


def chat_output(index: int, whole: WholeOutput, *, logprobs: int | None) -> CompletionOutput:
    """Return the whole output of a chat. Call it once."""
    return _chat_part(index, whole.output, whole.collected, whole.pieces, logprobs=logprobs)


class ChatParts:
    """Makes the parts of one streamed output of a chat. Tool calls are in the last one, whole."""

    def __init__(self, index: int, output: ChatOutput, *, logprobs: int | None) -> None:
        self._index = index
        self._output = output
        self._logprobs = logprobs
        self._collected = Collected()

    def push(self, pieces: Sequence[Piece]) -> CompletionOutput:
        """Return the part that ``pieces`` make, and end the run when the output needs no more."""
        self._collected.add(self._output.push(pieces))
        return _chat_part(self._index, self._output, self._collected, pieces, logprobs=self._logprobs)


def _chat_part(
    index: int, output: ChatOutput, collected: Collected, pieces: Sequence[Piece], *, logprobs: int | None
) -> CompletionOutput:
    """Return what was collected since the last part, of which ``pieces`` are the tokens."""
    thought, text = collected.take()
    plain = completion_output(index, pieces, output.run, logprobs=logprobs)
    calls = [] if output.finish is None else collected.calls
    return replace(
        plain,
        text=text,
        finish_reason=output.finish,
        stop_reason=output.stop or plain.stop_reason,
        reasoning=thought,
        tool_calls=[ToolCall(new_call_id(), call.name, call.arguments) for call in calls],
    )

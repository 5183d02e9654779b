"""A completion's choices: text, logprobs, and the echoed prompt before them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caravan_dialects.api.openai.completions.schema import CompletionChoice, Logprobs, PromptLogprob
from caravan_dialects.api.openai.events import FINISH_WORDS
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import PromptText, display_text
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.tokens import Alternative, PromptToken


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

"""The prompt before a choice's text: ``echo``."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_router.core.tokens import PromptToken
from caravan_router.http.openai.completions.choice import choice_of, top_logprobs
from caravan_router.http.openai.schema import CompletionChoice, Logprobs
from caravan_router.text.assembler import Piece
from caravan_router.text.prompt_text import PromptText


@dataclass(frozen=True, slots=True)
class Echo:
    """``logprobs``: None where the client wants none."""

    text: str
    logprobs: Logprobs | None


def echo_of(prompt: PromptText, scores: Sequence[PromptToken], logprobs: int | None) -> Echo:
    """``scores``: one for each token of the prompt, if ``logprobs`` were asked for."""
    if logprobs is None:
        return Echo(prompt.text, None)
    offsets, offset = [], 0
    for text in prompt.texts:
        offsets.append(offset)
        offset += len(text)
    tops = [
        # The first token follows nothing: it has no probability.
        None if score.logprob is None else top_logprobs(piece, score.logprob, score.alternatives[:logprobs])
        for piece, score in zip(prompt.tokenized.pieces, scores, strict=True)
    ]
    return Echo(
        prompt.text,
        Logprobs(
            tokens=list(prompt.texts),
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=tops if logprobs else None,
            text_offset=offsets,
        ),
    )


def first_choice(index: int, pieces: Sequence[Piece], logprobs: int | None, echo: Echo | None) -> CompletionChoice:
    """As `choice_of`, from the choice's start."""
    if echo is None:
        return choice_of(index, pieces, 0, logprobs)
    choice = choice_of(index, pieces, len(echo.text), logprobs)
    choice.text = echo.text + choice.text
    own, of_prompt = choice.logprobs, echo.logprobs
    if own is not None and of_prompt is not None:
        choice.logprobs = Logprobs(
            tokens=of_prompt.tokens + own.tokens,
            token_logprobs=of_prompt.token_logprobs + own.token_logprobs,
            top_logprobs=(of_prompt.top_logprobs or []) + own.top_logprobs if own.top_logprobs is not None else None,
            text_offset=of_prompt.text_offset + own.text_offset,
        )
    return choice

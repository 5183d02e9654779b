"""A prompt as text, token by token."""

from dataclasses import dataclass

from caravan_router.core.engine import TokenizedText
from caravan_router.text.detokenize import IncrementalDecoder
from caravan_router.text.offsets import token_spans


@dataclass(frozen=True, slots=True)
class PromptText:
    """``texts``, one for each token, joined are the prompt."""

    tokenized: TokenizedText
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def as_written(text: str, tokenized: TokenizedText) -> PromptText:
    """Of a prompt that came as text, none of which is lost: a character belongs to the token that begins it."""
    texts, start = [], 0
    for span in token_spans(text, tokenized):
        stop = max(start, span.stop)
        texts.append(text[start:stop])
        start = stop
    if texts:
        texts[-1] += text[start:]
    return PromptText(tokenized, tuple(texts))


def as_decoded(tokenized: TokenizedText) -> PromptText:
    """Of a prompt that came as tokens: a character belongs to the token that completes it."""
    decoder = IncrementalDecoder()
    texts = [decoder.push(piece) for piece in tokenized.pieces]
    if texts:
        texts[-1] += decoder.flush()
    return PromptText(tokenized, tuple(texts))

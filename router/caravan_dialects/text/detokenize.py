"""Turns the bytes of tokens into text, and says which part of a text each of its tokens stands for."""

import codecs
from dataclasses import dataclass

from caravan_proto.messages.model import TokenizedText

_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Decodes UTF-8 that arrives in parts: incomplete characters wait for their other bytes, invalid bytes give U+FFFD.

    All outputs joined equal ``b"".join(inputs).decode("utf-8", "replace")``, however the bytes are split.
    """

    __slots__ = ("_decode",)

    def __init__(self) -> None:
        self._decode = _decoder("replace").decode

    def push(self, piece: bytes) -> str:
        """Return the characters that ``piece`` completes; "" while the last one is incomplete."""
        return self._decode(piece)

    def flush(self) -> str:
        """Return U+FFFD if the input ended inside a character, else ""."""
        return self._decode(b"", True)


def display_text(piece: bytes) -> str:
    """Return the text of one token by itself: a control token or an alternative, which are not part of the output."""
    return piece.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Characters ``start`` to ``stop`` of the text; both are equal for a token that stands for no text."""

    token_id: int
    text: str
    start: int
    stop: int


def token_spans(text: str, tokenized: TokenizedText) -> list[TokenSpan]:
    """Return the span of each token, in characters. A character split over several tokens belongs to each of them.

    Tokenizers may add a space before the text or normalise it: a token whose bytes are not found at its place in the
    text gets as many bytes of the text as it has itself.
    """
    data = text.encode()
    spans = []
    position = characters = 0
    for token_id, piece, special in zip(tokenized.token_ids, tokenized.pieces, tokenized.specials, strict=True):
        if data.startswith(piece, position):
            size = len(piece)
        elif special:
            size = 0
        elif piece[:1] == b" " and data.startswith(piece[1:], position):
            size = len(piece) - 1
        else:
            size = min(len(piece), len(data) - position)
        # A span that begins or ends inside a character includes that character.
        begins_inside = size > 0 and _is_continuation(data[position])
        stop = characters + sum(not _is_continuation(byte) for byte in data[position : position + size])
        spans.append(TokenSpan(token_id, display_text(piece), characters - begins_inside, stop))
        characters = stop
        position += size
    return spans


def _is_continuation(byte: int) -> bool:
    """Whether ``byte`` is one of the second to fourth bytes of a UTF-8 character."""
    return byte & 0xC0 == 0x80


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt and the text of each of its tokens; ``texts`` joined are the text of the prompt."""

    tokenized: TokenizedText
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.texts)


def as_written(text: str, tokenized: TokenizedText) -> PromptText:
    """Split a prompt that came as text over its tokens. A split character belongs to the token that begins it."""
    texts, start = [], 0
    for span in token_spans(text, tokenized):
        stop = max(start, span.stop)
        texts.append(text[start:stop])
        start = stop
    if texts:
        texts[-1] += text[start:]
    return PromptText(tokenized, tuple(texts))


def as_decoded(tokenized: TokenizedText) -> PromptText:
    """Decode a prompt that came as tokens. A split character belongs to the token that completes it."""
    decoder = IncrementalDecoder()
    texts = [decoder.push(piece) for piece in tokenized.pieces]
    if texts:
        texts[-1] += decoder.flush()
    return PromptText(tokenized, tuple(texts))

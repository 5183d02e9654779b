"""Where in a text its tokens lie."""

from dataclasses import dataclass

from caravan_router.core.engine import TokenizedText
from caravan_router.text.detokenize import display_text


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Characters ``start`` to ``stop`` of the text; a token that stands for no text has both equal."""

    token_id: int
    text: str
    start: int
    stop: int


def token_spans(text: str, tokenized: TokenizedText) -> list[TokenSpan]:
    """Spans in characters. A character split over tokens belongs to each of them.

    Tokenizers may add a space before the text, or normalise it: what cannot be found is placed where it should be.
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
        start, stop, position = (
            characters,
            characters + _leading_bytes(data, position, position + size),
            position + size,
        )
        # A span that begins or ends inside a character includes it.
        begins_inside = size > 0 and _is_continuation(data, position - size)
        spans.append(TokenSpan(token_id, display_text(piece), start - begins_inside, stop))
        characters = stop
    return spans


def _leading_bytes(data: bytes, start: int, stop: int) -> int:
    return sum(1 for byte in data[start:stop] if byte & 0xC0 != 0x80)


def _is_continuation(data: bytes, index: int) -> bool:
    return index < len(data) and data[index] & 0xC0 == 0x80

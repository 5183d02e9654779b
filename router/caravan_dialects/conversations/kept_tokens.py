"""Writes tokens as bytes: four for a token id, sixteen for the number of a cell of a picture or a sound."""

from array import array
from collections.abc import Sequence

from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER

# No id is as large. The number of a cell follows, without what all of them have.
_CELL = 0xFFFF_FFFF
_WORDS, _WORD_BITS = 3, 32


def packed(tokens: Sequence[int]) -> bytes:
    """Return the bytes of ``tokens``."""
    try:
        return array("I", tokens).tobytes()
    except OverflowError:
        return array("I", [word for token in tokens for word in _words(token)]).tobytes()


def unpacked(data: bytes) -> Sequence[int]:
    """Return the tokens of which `packed` made ``data``."""
    words = array("I", data)
    if _CELL not in words:
        return words
    tokens: list[int] = []
    at = 0
    while at < len(words):
        if words[at] != _CELL:
            tokens.append(words[at])
            at += 1
            continue
        number = sum(words[at + 1 + place] << (place * _WORD_BITS) for place in range(_WORDS))
        tokens.append(FIRST_CELL_NUMBER + number)
        at += 1 + _WORDS
    return tokens


def _words(token: int) -> Sequence[int]:
    if token < FIRST_CELL_NUMBER:
        return (token,)
    number = token - FIRST_CELL_NUMBER
    return (_CELL, *((number >> (place * _WORD_BITS)) & 0xFFFF_FFFF for place in range(_WORDS)))

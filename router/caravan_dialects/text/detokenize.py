"""Turns the bytes of tokens into text."""

import codecs

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

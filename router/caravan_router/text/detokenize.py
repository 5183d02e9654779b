"""Token bytes to text, a character at a time."""

import codecs

_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Joins bytes to characters: an unfinished character waits for its other bytes, invalid bytes become U+FFFD.

    All outputs joined equal ``b"".join(inputs).decode("utf-8", "replace")``, however the bytes were cut.
    """

    __slots__ = ("_decode",)

    def __init__(self) -> None:
        self._decode = _decoder("replace").decode

    def push(self, piece: bytes) -> str:
        """The characters that ``piece`` completes; "" while the last one is unfinished."""
        return self._decode(piece)

    def flush(self) -> str:
        """What an unfinished character at the end amounts to: U+FFFD, or ""."""
        return self._decode(b"", True)


def display_text(piece: bytes) -> str:
    """One token alone, as text: for control tokens and alternatives, which are no part of the output."""
    return piece.decode("utf-8", "replace")

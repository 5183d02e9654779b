"""Tokens in which other tokens are searched for."""

import sys
from array import array
from collections.abc import Sequence

_BYTES = 4


class TokenText:
    """Tokens as an array of 32-bit numbers in bytes, since searching bytes runs in C."""

    __slots__ = ("_bytes",)

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._bytes = bytearray()
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._bytes) // _BYTES

    def __getitem__(self, place: int) -> int:
        return int.from_bytes(self._bytes[_BYTES * place : _BYTES * (place + 1)], sys.byteorder)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens``."""
        self._bytes += as_bytes(tokens)

    def forget_first(self, count: int) -> None:
        """Remove the first ``count`` tokens, if there are any to remove."""
        del self._bytes[: max(0, _BYTES * count)]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return the tokens at [start, stop), fewer where the text ends before."""
        return array("i", bytes(self._bytes[_BYTES * start : _BYTES * stop])).tolist()

    def tail(self, count: int) -> bytes:
        """Return the last ``count`` tokens as bytes."""
        return bytes(self._bytes[-_BYTES * count :])

    def first_end(self, tokens: bytes, start: int) -> int | None:
        """Return the position behind the first occurrence of ``tokens`` that begins at ``start`` or later."""
        at = self._bytes.find(tokens, _BYTES * start)
        while at >= 0 and at % _BYTES:
            at = self._bytes.find(tokens, at + 1)
        return None if at < 0 else (at + len(tokens)) // _BYTES

    def last_end(self, tokens: bytes, stop: int) -> int | None:
        """Return the position behind the last occurrence of ``tokens`` that ends at ``stop`` or earlier."""
        at = self._bytes.rfind(tokens, 0, _BYTES * stop)
        while at >= 0 and at % _BYTES:
            at = self._bytes.rfind(tokens, 0, at + len(tokens) - 1)
        return None if at < 0 else (at + len(tokens)) // _BYTES


def as_bytes(tokens: Sequence[int]) -> bytes:
    """Return ``tokens`` as they are in a TokenText."""
    return array("i", tokens).tobytes()

"""The text of calls as it arrives, for readers written as generators: they yield where they need more of it."""

from collections.abc import Generator, Sequence
from typing import Any

import msgspec

Reading = Generator[None, None, None]
SPACE = " \n\r\t"


class CallText:
    """``text[at:]`` is still to be read. ``ended``: no more text will come; ``cut``: though the model would go on."""

    __slots__ = ("at", "cut", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = self.cut = False

    def add(self, text: str) -> None:
        self.text += text

    def drop(self, end: int) -> None:
        """Forget ``text[:end]``."""
        self.text = self.text[end:]
        self.at -= end

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it; "" at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def skip(self, characters: str = SPACE) -> Generator[None, None, str]:
        """Read all characters that are among ``characters``; return the one that follows, unread, or ""."""
        while (character := (yield from self.peek())) and character in characters:
            self.at += 1
        return character

    def follows(self, expected: str) -> Generator[None, None, bool]:
        """Return whether ``expected`` follows, without reading it."""
        while True:
            given = self.text[self.at : self.at + len(expected)]
            if not expected.startswith(given):
                return False
            if len(given) == len(expected):
                return True
            if self.ended:
                return False
            yield

    def accept(self, expected: str) -> Generator[None, None, bool]:
        """Read ``expected`` if it follows; return whether it did."""
        found = yield from self.follows(expected)
        if found:
            self.at += len(expected)
        return found

    def accept_units(self, expected: Sequence[str]) -> Generator[None, None, bool]:
        """Read all ``expected`` units, with any white space before each; read nothing if they do not follow."""
        start = self.at
        for unit in expected:
            yield from self.skip()
            if not (yield from self.accept(unit)):
                self.at = start
                return False
        return True

    def run(self, stops: str, limit: int) -> Generator[None, None, str]:
        """Read up to the next of the characters ``stops``, or ``limit`` characters, or the end."""
        start = self.at
        while (character := (yield from self.peek())) and character not in stops and self.at - start < limit:
            self.at += 1
        return self.text[start : self.at]


def overlap(text: str, marker: str, start: int = 0) -> int:
    """Return the length of the longest suffix of ``text[start:]`` that is a proper prefix of ``marker``."""
    for length in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def json_text(value: Any) -> str:
    """Return ``value`` as JSON."""
    return msgspec.json.encode(value).decode()

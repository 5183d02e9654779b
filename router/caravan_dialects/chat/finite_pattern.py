"""Lists the texts that a regular expression matches, if they are few."""

import re
from collections.abc import Iterator

# What stands for itself behind a backslash.
_PLAIN_ESCAPES = frozenset("^$\\.*+?()[]{}|/-_#&~ ")
_META = frozenset("^$\\.*+?()[]{}|")
_COUNT = re.compile(r"\{(\d{1,3})(?:,(\d{1,3}))?\}")
_DIGITS = "0123456789"


class _UnknownError(Exception):
    """The pattern has what this module does not read, or matches too many texts."""


def finite_texts(pattern: str, most: int) -> frozenset[str] | None:
    """Return all texts in which ``pattern`` is found; None if they may be more than ``most``.

    It reads literals, classes, groups, alternatives and small counts between anchors, and returns None for the rest.
    """
    try:
        reader = _Reader(pattern, most)
        found = reader.whole()
    except (_UnknownError, RecursionError):
        return None
    return found


class _Reader:
    def __init__(self, pattern: str, most: int) -> None:
        self._pattern = pattern
        self._at = 0
        self._most = most

    def whole(self) -> frozenset[str]:
        """Read alternatives with an anchor at both ends: without one, any text may precede or follow."""
        found = frozenset[str]()
        while True:
            self._expect("^")
            found = self._limited(found | self._sequence())
            self._expect("$")
            if self._at == len(self._pattern):
                return found
            self._expect("|")

    def _alternatives(self) -> frozenset[str]:
        found = self._sequence()
        while self._takes("|"):
            found = self._limited(found | self._sequence())
        return found

    def _sequence(self) -> frozenset[str]:
        found = frozenset({""})
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)$":
            found = self._product(found, self._counted(self._atom()))
        return found

    def _counted(self, texts: frozenset[str]) -> frozenset[str]:
        least, most = 1, 1
        if self._takes("?"):
            least = 0
        elif count := _COUNT.match(self._pattern, self._at):
            self._at = count.end()
            least = int(count[1])
            most = int(count[2] or least)
        # A lazy count matches the same texts.
        self._takes("?")
        if self._at < len(self._pattern) and self._pattern[self._at] in "*+?{":
            raise _UnknownError
        return frozenset[str]().union(*self._repeated(texts, least, most))

    def _repeated(self, texts: frozenset[str], least: int, most: int) -> Iterator[frozenset[str]]:
        found = frozenset({""})
        for count in range(most + 1):
            if count >= least:
                yield found
            if count < most:
                found = self._product(found, texts)

    def _atom(self) -> frozenset[str]:
        character = self._next()
        if character == "(":
            if self._takes("?"):
                self._expect(":")
            found = self._alternatives()
            self._expect(")")
            return found
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escaped()
        if character in _META:
            raise _UnknownError
        return frozenset({character})

    def _class(self) -> frozenset[str]:
        found = set[str]()
        # Dialects differ in what a bracket means here.
        if self._takes("]"):
            raise _UnknownError
        while not self._takes("]"):
            character = self._next()
            if character in "^[&~" or (character == "-" and found):
                raise _UnknownError
            first = self._escaped() if character == "\\" else frozenset({character})
            if self._pattern[self._at : self._at + 1] == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._next()
                if last in "\\[" or len(first) > 1:
                    raise _UnknownError
                start = ord(min(first))
                if ord(last) - start >= self._most:
                    raise _UnknownError
                first = frozenset(map(chr, range(start, ord(last) + 1)))
            found |= first
        return self._limited(frozenset(found))

    def _escaped(self) -> frozenset[str]:
        character = self._next()
        if character == "d":
            return frozenset(_DIGITS)
        if character not in _PLAIN_ESCAPES:
            raise _UnknownError
        return frozenset({character})

    def _product(self, firsts: frozenset[str], seconds: frozenset[str]) -> frozenset[str]:
        if len(firsts) * len(seconds) > self._most:
            raise _UnknownError
        return frozenset(first + second for first in firsts for second in seconds)

    def _limited(self, texts: frozenset[str]) -> frozenset[str]:
        if len(texts) > self._most:
            raise _UnknownError
        return texts

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise _UnknownError
        self._at += 1
        return self._pattern[self._at - 1]

    def _takes(self, character: str) -> bool:
        found = self._pattern[self._at : self._at + 1] == character
        self._at += int(found)
        return found

    def _expect(self, character: str) -> None:
        if not self._takes(character):
            raise _UnknownError

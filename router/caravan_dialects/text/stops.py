"""Finds stop strings in text that arrives in parts, and tells how much of its end could still begin one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The position of ``stop`` in the whole text: from ``start`` up to, but not including, ``end``."""

    start: int
    end: int
    stop: str


class StopMatcher:
    """The first stop string to be completed wins; of those that end at the same character, the longest wins.

    The result therefore does not depend on how the text is split, and the text before the match holds no stop string.
    Each stop string has a Knuth-Morris-Pratt automaton, which looks at each character once.
    """

    __slots__ = ("_failures", "_position", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everything"
        # Longest first: the first one found at a character is the one that starts earliest.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._position = 0

    @property
    def held(self) -> int:
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str, *, ignore_matches: bool = False) -> StopMatch | None:
        """Read the next part of the text and return the first match. Do not call again after a match.

        With ``ignore_matches``, stop strings that end in this part do not count, but one may begin in it.
        """
        found: StopMatch | None = None
        for number, stop in enumerate(self._stops):
            if self._states[number] == 0 and stop[0] not in text:
                continue  # It is not begun, and does not begin in this part.
            end = self._advance(number, stop, text, ignore_matches)
            # Only a strictly earlier end replaces a match: at the same end, the longer string came first.
            if end is not None and (found is None or end < found.end):
                found = StopMatch(end - len(stop), end, stop)
        self._position += len(text)
        return found

    def _advance(self, number: int, stop: str, text: str, ignore_matches: bool) -> int | None:
        """Run one automaton over ``text``; return the position after the first match."""
        failure = self._failures[number]
        state = self._states[number]
        for offset, character in enumerate(text):
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
                if state == len(stop):
                    if not ignore_matches:
                        return self._position + offset + 1
                    state = failure[-1]
        self._states[number] = state
        return None


class StopCutter:
    """Cuts a text that arrives in parts at the first of its stop strings, or after it with ``keep_stop``."""

    __slots__ = ("_held", "_keep_stop", "_matcher", "_passed", "found")

    def __init__(self, stops: Sequence[str], *, keep_stop: bool) -> None:
        self._matcher = StopMatcher(stops)
        self._keep_stop = keep_stop
        # The end of the text that may begin a stop string, and the number of characters before it.
        self._held = ""
        self._passed = 0
        # The stop string that ended the text.
        self.found: str | None = None

    def feed(self, text: str, *, ignore_matches: bool = False) -> str:
        """Read the next part of the text and return what is certain to stay. Do not call again after a match."""
        self._held += text
        match = self._matcher.feed(text, ignore_matches=ignore_matches)
        if match is None:
            return self._pass(len(self._held) - self._matcher.held)
        start, end = match.start - self._passed, match.end - self._passed
        self.found = self._held[start:end]
        return self._pass(end if self._keep_stop else start)

    def flush(self) -> str:
        """Return what was held back, at the end of the text; "" after a match."""
        return "" if self.found is not None else self._pass(len(self._held))

    def _pass(self, count: int) -> str:
        passed, self._held = self._held[:count], self._held[count:]
        self._passed += count
        return passed


def _failure_table(stop: str) -> tuple[int, ...]:
    """Return, for each prefix of ``stop``, the length of its longest proper suffix that is also a prefix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return tuple(table)

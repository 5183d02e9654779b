"""Finds stop strings in text that arrives in pieces, and says how much of it could still begin one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where the stop string lies in the whole text, ``start`` included, ``end`` not."""

    start: int
    end: int


class StopMatcher:
    """The first stop string to be completed wins; of those that end at the same character, the longest.

    So the result does not depend on where the text was cut, and the text before the match holds no stop string.
    One Knuth-Morris-Pratt automaton per stop string: each character is looked at once per stop string.
    """

    __slots__ = ("_failures", "_position", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everything"
        # Longest first, so that the first one found at a character is the one that starts earliest.
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._position = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Reads on. Not to be called again after a match."""
        found: StopMatch | None = None
        for number, stop in enumerate(self._stops):
            end = self._advance(number, stop, text)
            # Strictly earlier only: at the same end the longer one, read before, stays.
            if end is not None and (found is None or end < found.end):
                found = StopMatch(end - len(stop), end)
        self._position += len(text)
        return found

    def _advance(self, number: int, stop: str, text: str) -> int | None:
        failure = self._failures[number]
        state = self._states[number]
        for offset, character in enumerate(text):
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
                if state == len(stop):
                    return self._position + offset + 1
        self._states[number] = state
        return None


def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper suffix that is again a prefix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return tuple(table)

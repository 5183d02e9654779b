"""Requests that no shard can take yet."""

import bisect
from collections.abc import Callable, Iterator
from typing import TypeVar

from caravan_router.scheduling.sequence import Sequence

Place = TypeVar("Place")


def _arrival(sequence: Sequence) -> int:
    return sequence.request.request_id


class WaitingQueue:
    """First come, first served, with bounded bypass.

    A sequence that lost its shard keeps its place by arrival, so it re-enters in front. One that does not fit yet lets
    at most ``max_bypass`` others past; then nobody passes until it fits.
    """

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Add by arrival."""
        bisect.insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take out one that is in the queue."""
        self._sequences.remove(sequence)

    def pop_fitting(self, place_for: Callable[[Sequence], Place | None]) -> tuple[Sequence, Place] | None:
        """Take the first for which ``place_for`` finds a place; None if there is none that may go now."""
        for index, sequence in enumerate(self._sequences):
            place = place_for(sequence)
            if place is not None:
                del self._sequences[index]
                for passed in self._sequences[:index]:
                    passed.bypassed += 1
                return sequence, place
            if sequence.bypassed >= self._max_bypass:
                return None
        return None

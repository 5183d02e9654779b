"""Requests that no shard can take yet, and the order in which they should be admitted."""

import bisect
import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, TypeVar

from caravan_router.scheduling.sequence import Request, Sequence
from caravan_router.scheduling.waiting.fair_share import FairShare

Place = TypeVar("Place")


class Hold(Enum):
    """The type of ``HOLD``."""

    HOLD = "hold"


# Instead of a place: it has one, but gains by waiting (its prefix is being computed for another).
HOLD: Final = Hold.HOLD


def effective_priority(request: Request, now: float, aging_s: float) -> int:
    """Its priority, one higher for every ``aging_s`` since it arrived, so that no stream of higher ones starves it."""
    return request.spec.priority + math.floor((now - request.arrived_s) / aging_s)


def _arrival(sequence: Sequence) -> int:
    return sequence.request_id


class WaitingQueue:
    """By effective priority; then those that lost their cells; then by fair share; then by arrival. Bounded bypass.

    One that does not fit yet lets at most ``max_bypass`` others past; then nobody behind it goes before it fits.
    """

    def __init__(self, max_bypass: int, aging_s: float = math.inf, fair_share: FairShare | None = None) -> None:
        self._max_bypass = max_bypass
        self._aging_s = aging_s
        self._fair_share = FairShare() if fair_share is None else fair_share
        # By arrival: a stable sort by all the rest is then the order.
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """By arrival."""
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        """Add one that is not in the queue."""
        bisect.insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take out one that is in the queue."""
        index = bisect.bisect_left(self._sequences, _arrival(sequence), key=_arrival)
        assert self._sequences[index : index + 1] == [sequence], f"request {_arrival(sequence)} is not waiting"
        del self._sequences[index]

    def ordered(self, now: float) -> list[Sequence]:
        """All, in the order in which they should be admitted."""
        counters: dict[str, float] = {}
        # Age lifts a request to those above it, never over them: there, fair share decides.
        top = max((sequence.spec.priority for sequence in self._sequences), default=0)

        def rank(sequence: Sequence) -> tuple[int, bool, float]:
            request = sequence.request
            name = request.spec.tenant.name
            if name not in counters:
                counters[name] = self._fair_share.counter(request.spec.tenant)
            priority = min(effective_priority(request, now, self._aging_s), top)
            return -priority, not sequence.started, counters[name]

        return sorted(self._sequences, key=rank)

    def pop_fitting(
        self, place_for: Callable[[Sequence], Place | Hold | None], now: float = 0.0
    ) -> tuple[Sequence, Place] | None:
        """Take the first for which ``place_for`` finds a place; None if there is none that may go now.

        ``place_for`` gives None for one that does not fit yet, and HOLD for one that chooses to wait: that one is
        passed over, which does not count, and it stops nobody.
        """
        passed: list[Sequence] = []
        for sequence in self.ordered(now):
            place = place_for(sequence)
            if place is HOLD:
                continue
            if place is not None:
                self.remove(sequence)
                for other in passed:
                    other.bypassed += 1
                return sequence, place
            if sequence.bypassed >= self._max_bypass:
                return None
            passed.append(sequence)
        return None

"""Requests that no shard has taken, and the order in which they should be admitted."""

import bisect
import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TypeVar

from caravan_router.scheduling.sequence import Request, Sequence
from caravan_router.scheduling.waiting.fair_share import FairShare

T = TypeVar("T")


class NotNow(Enum):
    """Why a waiting request does not start now."""

    # Nothing can take it. Requests behind it may go first, but only so many.
    NO_ROOM = "no_room"
    # It starts sooner by waiting, since its prefix is being computed. Requests behind it may go first.
    PREFIX_COMING = "prefix_coming"


def effective_priority(request: Request, now: float, aging_s: float) -> int:
    """Return its priority, one higher for every ``aging_s`` since it arrived, so that higher ones never starve it."""
    return request.spec.priority + math.floor((now - request.arrived_s) / aging_s)


def _arrival(sequence: Sequence) -> int:
    return sequence.request_id


class WaitingQueue:
    """Order: effective priority, then requests that lost their cells, then fair share, then arrival.

    A request without room lets at most ``max_bypass`` others go first; then nobody behind it starts before it does.
    """

    def __init__(self, max_bypass: int, aging_s: float = math.inf, fair_share: FairShare | None = None) -> None:
        self._max_bypass = max_bypass
        self._aging_s = aging_s
        self._fair_share = FairShare() if fair_share is None else fair_share
        # By arrival: a stable sort by all the rest is then the order.
        self._sequences: list[Sequence] = []
        self._is_due = False

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate by arrival."""
        return iter(self._sequences)

    @property
    def is_due(self) -> bool:
        """Whether a request waits and something happened since `begin_admission` that may let one start."""
        return self._is_due and bool(self._sequences)

    def mark_due(self) -> None:
        """Note that something happened that may let a request start."""
        self._is_due = True

    def begin_admission(self, now: float) -> Sequence:
        """Return the first in order. The queue is not due again before something else happens."""
        self._is_due = False
        return self.ordered(now)[0]

    def push(self, sequence: Sequence) -> None:
        """Add ``sequence``, which is not in the queue."""
        bisect.insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take out ``sequence``, which is in the queue."""
        index = bisect.bisect_left(self._sequences, _arrival(sequence), key=_arrival)
        assert self._sequences[index : index + 1] == [sequence], f"request {_arrival(sequence)} is not waiting"
        del self._sequences[index]

    def ordered(self, now: float) -> list[Sequence]:
        """Return all in the order in which they should be admitted."""
        counters: dict[str, float] = {}
        # Age lifts a request to the highest priority that waits, never above it: there, fair share decides.
        top = max((sequence.spec.priority for sequence in self._sequences), default=0)

        def rank(sequence: Sequence) -> tuple[int, bool, float]:
            tenant = sequence.spec.tenant
            if tenant.name not in counters:
                counters[tenant.name] = self._fair_share.counter(tenant)
            priority = min(effective_priority(sequence.request, now, self._aging_s), top)
            return -priority, not sequence.started, counters[tenant.name]

        return sorted(self._sequences, key=rank)

    def pop_fitting(self, place_for: Callable[[Sequence], T | NotNow], now: float = 0.0) -> tuple[Sequence, T] | None:
        """Take out the first request for which ``place_for`` finds a place; None if none may start now."""
        passed: list[Sequence] = []
        for sequence in self.ordered(now):
            place = place_for(sequence)
            if place is NotNow.PREFIX_COMING:
                continue
            if place is not NotNow.NO_ROOM:
                self.remove(sequence)
                for other in passed:
                    other.bypassed += 1
                return sequence, place
            if sequence.bypassed >= self._max_bypass:
                return None
            passed.append(sequence)
        return None

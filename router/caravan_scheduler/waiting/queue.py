"""Requests that no shard has taken, the order in which they should be admitted, and when they must end."""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from typing import TypeVar

from caravan_scheduler.actions import FailureReason
from caravan_scheduler.sequence import Request, Sequence
from caravan_scheduler.waiting.fair_share import FairShare

T = TypeVar("T")
# A plan reads at most this many requests of the order.
MOST_READ = 256


class Deadlines:
    """Yields each deadline once when it has passed, even if its request has ended or started in time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, FailureReason]] = []

    def add(self, request: Request) -> None:
        """Remember by when ``request`` must start and end."""
        for at, reason in (
            (request.start_by_s, FailureReason.QUEUE_TIMEOUT),
            (request.end_by_s, FailureReason.DEADLINE),
        ):
            if at < math.inf:
                heapq.heappush(self._heap, (at, request.request_id, reason))

    def due(self, now: float) -> Iterator[tuple[int, FailureReason]]:
        """Yield the requests whose deadlines have passed since the last call."""
        while self._heap and self._heap[0][0] <= now:
            _, request_id, reason = heapq.heappop(self._heap)
            yield request_id, reason


class NotNow(Enum):
    """Why a waiting request does not start now."""

    # Nothing can take it. Requests after it may start first, at most `max_bypass` of them.
    NO_ROOM = "no_room"
    # It waits for cells that are held for jobs, until the policy gives them up. Requests behind it may go first.
    HELD = "held"
    # It waits for what a shard computes: its prefix, its media, or another request that may kill the shard. Requests
    # behind it may go first.
    PREFIX_COMING = "prefix_coming"
    # Neither it nor any request behind it can start, so that these need not be asked for.
    NOBODY = "nobody"


def effective_priority(request: Request, now: float, aging_s: float) -> int:
    """Return its priority, one higher for every ``aging_s`` since it arrived, so that higher ones never starve it."""
    return request.spec.priority + math.floor((now - request.arrived_s) / aging_s)


def _arrival(sequence: Sequence) -> int:
    return sequence.request_id


def _charged(sequence: Sequence) -> float:
    return sequence.account.counter


class WaitingQueue:
    """Order: effective priority, then requests that lost their cells, then fair share, then arrival.

    Fair share is that between tenants, then that between the sessions of a tenant.

    A request without room lets at most ``max_bypass`` others go first; then nobody behind it starts before it does.

    Requests with the same priority, start, tenant and session stay in the order of their arrival, since the older one
    is never of lower effective priority. Each such *bucket* is kept sorted, and the order is merged from their heads as
    far as it is read: taking the first requests costs the same however many wait behind them.
    """

    def __init__(
        self,
        max_bypass: int,
        aging_s: float = math.inf,
        fair_share: FairShare | None = None,
        charged: Callable[[Sequence], float] | None = None,
    ) -> None:
        """``charged``: returns what a request's session counts as charged; None: what it was charged."""
        self._charged = charged or _charged
        self._max_bypass = max_bypass
        self._aging_s = aging_s
        self._fair_share = FairShare() if fair_share is None else fair_share
        # By priority, whether they started before, the names of tenant and session, and the request if it continues.
        self._buckets: dict[tuple[int, bool, str, str, int], list[Sequence]] = {}
        self._length = self._bulk = 0
        # When the last request came that is not bulk work.
        self.urgent_came_s = -math.inf
        # Requests that wait for one shard and are not asked for, by id.
        self._deferred: dict[int, Sequence] = {}
        self._is_due = False
        self._has_new = False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate by arrival."""
        return heapq.merge(*self._buckets.values(), sorted(self._deferred.values(), key=_arrival), key=_arrival)

    @property
    def urgent(self) -> int:
        """How many requests wait that are not bulk work."""
        return self._length - self._bulk

    @property
    def deferred(self) -> Collection[Sequence]:
        """The requests that are left out of the order."""
        return self._deferred.values()

    @property
    def is_due(self) -> bool:
        """Whether a request waits and something happened since `begin_admission` that may let any of them start."""
        return self._is_due and self._length > 0

    @property
    def has_new(self) -> bool:
        """Whether a request was added since `begin_admission` that may be among the first MOST_READ in order."""
        return self._has_new and self._length > 0

    @property
    def is_anyone_asked_for(self) -> bool:
        """Whether a request waits that is not deferred."""
        return self._length > len(self._deferred)

    def mark_due(self) -> None:
        """Note that something happened that may let any request start, on any shard."""
        self._is_due = True

    def begin_admission(self, now: float) -> Sequence:
        """Return the first in order. The queue is not due again before something else happens."""
        self._is_due = self._has_new = False
        return next(self.in_order(now))

    def push(self, sequence: Sequence) -> None:
        """Add ``sequence``, which is not in the queue."""
        self._insert(sequence)
        self._length += 1
        self._bulk += sequence.is_bulk
        if not sequence.is_bulk:
            self.urgent_came_s = max(self.urgent_came_s, sequence.request.arrived_s)

    def defer(self, sequence: Sequence) -> None:
        """Leave ``sequence``, which is in the queue, out of the order until it is requeued."""
        self._take_out(sequence)
        self._deferred[sequence.request_id] = sequence

    def requeue(self, sequence: Sequence) -> None:
        """Put ``sequence`` back into the order. Ignored if it has left the queue."""
        if self._deferred.pop(sequence.request_id, None) is not None:
            self._insert(sequence)

    def _insert(self, sequence: Sequence) -> None:
        bucket = self._buckets.setdefault(_bucket(sequence), [])
        index = bisect.bisect_right(bucket, _arrival(sequence), key=_arrival)
        bucket.insert(index, sequence)
        # No plan reads more than the first MOST_READ of a bucket.
        self._has_new = self._has_new or index < MOST_READ

    def remove(self, sequence: Sequence) -> None:
        """Take out ``sequence``, which is in the queue."""
        if self._deferred.pop(sequence.request_id, None) is None:
            self._take_out(sequence)
        self._length -= 1
        self._bulk -= sequence.is_bulk

    def _take_out(self, sequence: Sequence) -> None:
        bucket = self._buckets.get(_bucket(sequence), [])
        index = bisect.bisect_left(bucket, _arrival(sequence), key=_arrival)
        assert bucket[index : index + 1] == [sequence], f"request {_arrival(sequence)} is not waiting"
        del bucket[index]
        if not bucket:
            del self._buckets[_bucket(sequence)]

    def in_order(self, now: float) -> Iterator[Sequence]:
        """Yield requests in the order in which they should be admitted, but for those that are deferred.

        The queue must not change meanwhile.
        """
        if len(self._buckets) > 1:
            return self._merged(now)
        return itertools.chain.from_iterable(self._buckets.values())

    def _merged(self, now: float) -> Iterator[Sequence]:
        rank = self._rank(now)
        # Mostly the first is all that is read, and there may be a bucket for each request.
        yield min((bucket[0] for bucket in self._buckets.values()), key=rank)
        yield from itertools.islice(heapq.merge(*self._buckets.values(), key=rank), 1, None)

    def _rank(self, now: float) -> Callable[[Sequence], tuple[int, bool, float, float, int]]:
        # Age lifts a request to the highest priority that waits, never above it: there, fair share decides.
        top = max((priority for priority, *_ in self._buckets), default=0)
        counters: dict[str, float] = {}
        # Of the sessions that wait. Accounts of sessions of two tenants cannot be compared, how far they are ahead can.
        least: dict[str, float] = {}
        for (_, _, name, _, _), bucket in self._buckets.items():
            counter = self._charged(bucket[0])
            if name not in least:
                counters[name] = self._fair_share.counter(bucket[0].spec.tenant)
                least[name] = counter
            elif counter < least[name]:
                least[name] = counter

        def rank(sequence: Sequence) -> tuple[int, bool, float, float, int]:
            spec = sequence.spec
            name, priority = spec.tenant.name, top
            if spec.priority < top:
                priority = min(effective_priority(sequence.request, now, self._aging_s), top)
            ahead = self._charged(sequence) - least[name]
            return -priority, not sequence.started, counters[name], ahead, sequence.request_id

        return rank

    def pop_fitting(self, place_for: Callable[[Sequence], T | NotNow], now: float = 0.0) -> tuple[Sequence, T] | None:
        """Take out the first request for which ``place_for`` finds a place; None if none may start now."""
        passed: list[Sequence] = []
        for sequence in self.in_order(now):
            place = place_for(sequence)
            if place is NotNow.NOBODY:
                return None
            if place is NotNow.PREFIX_COMING or place is NotNow.HELD:
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


def _bucket(sequence: Sequence) -> tuple[int, bool, str, str, int]:
    spec = sequence.spec
    # What those that continue count as charged differs from request to request.
    own = sequence.request_id if sequence.continues is not None else 0
    return spec.priority, sequence.started, spec.tenant.name, spec.session, own

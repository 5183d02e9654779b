"""What the scheduler's own policy for jobs is compared with."""

import math
from enum import Enum

from caravan_scheduler.jobs.expected_return import ExpectedReturn
from caravan_scheduler.jobs.policy import NewPolicy, PolicyInput
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.policy import NOTHING_HELD, Held
from caravan_scheduler.shard.resident import Resident


class LeastRecentlyUsed:
    """What was used least recently makes way for any request. Sessions of a key share alike, as always."""

    refusals = 0

    def __init__(self, given: PolicyInput) -> None:
        self._clock = given.clock

    def in_order_of_eviction(self, _shard: ShardAccount, parked: list[Resident]) -> list[Resident]:
        """Return ``parked`` by last use."""
        return parked

    def held(self, _shard: ShardAccount, _sequence: Sequence) -> Held:
        """Hold nothing."""
        return NOTHING_HELD

    def is_expected(self, _resident: Resident) -> bool:
        """Expect nothing."""
        return False

    def charged(self, sequence: Sequence) -> float:
        """Return what the session of ``sequence`` was charged."""
        return sequence.account.counter

    def take_refusals(self) -> bool:
        """Refuse nothing."""
        return False


# The defaults of llm-d's `program-aware-fairness`.
_HALF_LIFE_S = 60.0
_SERVICE_WEIGHT, _WAIT_WEIGHT = 0.8, 0.2


class LeastAttainedService(LeastRecentlyUsed):
    """The session that attained least service lately goes first, as in llm-d's fairness policy ``las``.

    Service is prompt tokens, and output tokens twice, of requests that have ended; it halves every minute. How long a
    request has waited counts a fifth.
    """

    def __init__(self, given: PolicyInput) -> None:
        super().__init__(given)
        # By session, with when it was noted.
        self._attained: dict[str, tuple[float, float]] = {}
        self._ended: dict[str, int] = {}

    def charged(self, sequence: Sequence) -> float:
        """Return the attained service, and less for a request that has waited."""
        attained = self._service(sequence)
        waited_s = self._clock.now_s - sequence.request.arrived_s
        # Both are compared with what is usual here: a whole context, and a minute.
        return _SERVICE_WEIGHT * attained / _USUAL_TOKENS - _WAIT_WEIGHT * waited_s / _HALF_LIFE_S

    def _service(self, sequence: Sequence) -> float:
        """Return the decayed service of the session, with what its request before had."""
        session, job = sequence.spec.session, sequence.job
        known, at_s = self._attained.get(session, (0.0, self._clock.now_s))
        decayed = known * math.exp2((at_s - self._clock.now_s) / _HALF_LIFE_S)
        if job is not None and job.length and self._ended.get(session) != job.length:
            self._ended[session] = job.length
            decayed += job.length
        self._attained[session] = decayed, self._clock.now_s
        return decayed


_USUAL_TOKENS = 50_000.0


class JobPolicy(Enum):
    """Which cells of ended requests make way, and which session goes first."""

    LRU = "LRU"
    LAS = "least attained service"
    CARAVAN = "Caravan"

    @property
    def new(self) -> NewPolicy:
        """What makes it."""
        return _POLICIES[self]


_POLICIES: dict[JobPolicy, NewPolicy] = {
    JobPolicy.LRU: LeastRecentlyUsed,
    JobPolicy.LAS: LeastAttainedService,
    JobPolicy.CARAVAN: ExpectedReturn,
}

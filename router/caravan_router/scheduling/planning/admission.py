"""Which waiting requests start in one plan: it asks for the first in order, and stops where asking costs too much."""

import math
from collections.abc import Callable, Iterable

from caravan_router.scheduling.planning.moving import begin_fetch
from caravan_router.scheduling.planning.openings import Openings
from caravan_router.scheduling.planning.placement import Place, choose
from caravan_router.scheduling.planning.step_plan import StepPlan
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.ledger import ShardLedger
from caravan_router.scheduling.state import SchedulerState
from caravan_router.scheduling.waiting.queue import MOST_READ, NotNow

# A plan looks for places for at most so many requests. Nobody behind them starts before the next plan.
_MOST_ASKED = 64


class StepPlans:
    """The step plans of one call, each made when it is first needed. ``now``: the time of the call, in seconds."""

    def __init__(self, make: Callable[[ShardLedger], StepPlan], now: float) -> None:
        self._make = make
        self._made: dict[str, StepPlan] = {}
        self.now = now

    @property
    def made(self) -> Iterable[StepPlan]:
        """The plans that were needed."""
        return self._made.values()

    def of(self, shard: ShardLedger) -> StepPlan:
        """Return the plan of ``shard``, which can take a command."""
        plan = self._made.get(shard.name)
        if plan is None:
            plan = self._made[shard.name] = self._make(shard)
        return plan


class Admission:
    """Finds places for waiting requests, and starts them. It remembers who has none: room only shrinks in a plan."""

    def __init__(self, state: SchedulerState, openings: Openings, plans: StepPlans) -> None:
        self._state = state
        self._openings = openings
        self._plans = plans
        # By request id.
        self._answers: dict[int, NotNow] = {}
        self._asked = 0
        # The highest priority of a request that has no room.
        self._blocked = -math.inf

    def place_for(self, sequence: Sequence) -> Place | NotNow:
        """Return where ``sequence`` can start now, or why it cannot."""
        openings, request_id = self._openings, sequence.request.request_id
        if not openings.is_any_open:
            return NotNow.NOBODY
        known = self._answers.get(request_id)
        if known is not None:
            return known
        if self._asked >= _MOST_ASKED or len(self._answers) >= MOST_READ:
            return NotNow.NOBODY
        if sequence.spec.priority < self._blocked:
            # Else what was preempted for a higher priority would take its place back.
            place: Place | NotNow = NotNow.NO_ROOM
        elif openings.awaits_prefix(request_id) or self._state.transfers.is_awaited_by(request_id):
            place = NotNow.PREFIX_COMING
        else:
            self._asked += 1
            if sequence.needs_prompt_logprobs:
                self._state.known_logprobs.share_with(sequence)
            place = choose(openings, self._plans.of, sequence)
            if isinstance(place, Place) and begin_fetch(self._state, sequence, place):
                place = NotNow.PREFIX_COMING
        if isinstance(place, NotNow):
            self._answers[request_id] = place
            if place is NotNow.NO_ROOM:
                self._blocked = max(self._blocked, sequence.spec.priority)
        return place

    def start(self, sequence: Sequence, place: Place) -> None:
        """Start ``sequence``, which has left the queue, in ``place``."""
        plan = place.plan
        resident = plan.load(sequence, place.saved) if place.saved.length else plan.admit(sequence, place.match)
        self._state.stay(sequence, plan.shard, resident)
        self._openings.note_start(sequence, plan.shard)
        if plan.is_full:
            self._openings.close(plan.shard)

"""Decides what every shard does next: who is preempted, who starts, what the next step carries."""

import functools
import itertools
import math

from caravan_router.scheduling.actions import Preempt, Preemption, Save, SetLayout
from caravan_router.scheduling.config import PrefillMode
from caravan_router.scheduling.planning.forecast import CellForecast
from caravan_router.scheduling.planning.layout import may_return, needs_other_layout
from caravan_router.scheduling.planning.placement import Place, choose
from caravan_router.scheduling.planning.preemption import choose_how, victims_of_growth, victims_of_priority
from caravan_router.scheduling.planning.saving import releases, to_save
from caravan_router.scheduling.planning.step_plan import PlanInput, StepPlan
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.ledger import ShardLedger
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.state import SchedulerState
from caravan_router.scheduling.waiting.queue import NotNow


class Planner:
    """Plans the next commands from ``state``, and numbers them."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._command_ids = itertools.count(1)

    def plan(self, now: float, *, preempted: bool) -> None:
        """Send a command to every shard that should get one.

        ``preempted``: whether requests lost their cells in this call of the scheduler; then no other is admitted.
        """
        shards = [shard for shard in self._state.shards.values() if self._needs_plan(shard, now)]
        if not shards:
            return
        first = self._first_to_fit(now)
        for shard in shards:
            victims = victims_of_growth(shard)
            if victims:
                self._preempt(shard, victims)
                preempted = True
            elif self._wants_other_layout(shard, first, now):
                self._change_layout(shard)
            else:
                waiting = len(self._state.waiting)
                self._save(shard, to_save(shard, now, waiting), release=releases(shard, waiting))
        if not preempted and len(self._state.waiting):
            self._admit(shards, now)
        else:
            self._send(self._plans(shards, now), now)

    def _needs_plan(self, shard: ShardLedger, now: float) -> bool:
        """Whether ``shard`` should get a command. Runs for every shard after every step of any: keep it cheap."""
        if not shard.can_command:
            return False
        if not shard.in_flight or shard.release_now or self._may_admit:
            return True
        return bool(to_save(shard, now, len(self._state.waiting)))

    @property
    def _may_admit(self) -> bool:
        waiting = self._state.waiting
        # In pause mode the mere number of steps lets requests start.
        return waiting.is_due or (self._state.config.mode is PrefillMode.PAUSE and len(waiting) > 0)

    def _plans(self, shards: list[ShardLedger], now: float, adapter: str | None = None) -> list[StepPlan]:
        """Return a plan for each shard that can take a command. ``adapter``: see `PlanInput`."""
        waiting = len(self._state.waiting)
        return [self._plan(shard, now, waiting, adapter) for shard in shards if shard.can_command]

    def _plan(self, shard: ShardLedger, now: float, waiting: int, adapter: str | None) -> StepPlan:
        config, lengths = self._state.config, self._state.lengths
        return StepPlan(shard, PlanInput(config=config, lengths=lengths, now=now, waiting=waiting, adapter=adapter))

    # Admission

    def _admit(self, shards: list[ShardLedger], now: float) -> None:
        """Start the requests that the shards can take, or preempt for the first; then send the shards' commands."""
        state = self._state
        first = state.waiting.begin_admission(now)
        plans = self._plans(shards, now, first.spec.adapter)
        blocked = -math.inf

        def place_for(sequence: Sequence) -> Place | NotNow:
            nonlocal blocked
            if sequence.spec.priority < blocked:
                return NotNow.NO_ROOM  # else what was preempted for a higher priority would take its place back
            place = choose(plans, state.shards.values(), sequence)
            if place is NotNow.NO_ROOM:
                blocked = max(blocked, sequence.spec.priority)
            return place

        open_to_first = [plan.shard for plan in plans if plan.adapter == first.spec.adapter]
        if place_for(first) is NotNow.NO_ROOM and self._preempt_for(first, open_to_first):
            plans = self._plans(shards, now, first.spec.adapter)
            place = choose(plans, state.shards.values(), first)
            if isinstance(place, Place):  # nothing needs to be saved before it starts
                state.waiting.remove(first)
                self._start(first, place)
        else:
            while (placed := state.waiting.pop_fitting(place_for, now)) is not None:
                self._start(*placed)
        self._send(plans, now)

    def _start(self, sequence: Sequence, place: Place) -> None:
        state, plan = self._state, place.plan
        resident = plan.load(sequence, place.saved) if place.saved.length else plan.admit(sequence, place.match)
        state.stay(sequence, plan.shard, resident)

    def _send(self, plans: list[StepPlan], now: float) -> None:
        for plan in plans:
            if plan.is_idle:  # no request could start for which the step was kept
                plan = self._plan(plan.shard, now, waiting=0, adapter=None)
            command = plan.send(next(self._command_ids))
            if command is not None:
                self._state.outbox.add(command)

    # Preemption

    def _preempt_for(self, sequence: Sequence, shards: list[ShardLedger]) -> bool:
        """Preempt lower priorities for ``sequence`` where that takes the fewest. Return whether any were preempted."""
        best: tuple[ShardLedger, list[Resident]] | None = None
        for shard in shards:
            if all(resident.priority >= sequence.spec.priority for resident in shard.residents.values()):
                continue
            forecast = functools.partial(CellForecast, shard, self._state.lengths, self._state.config.watermark)
            victims = victims_of_priority(shard, sequence, forecast)
            if victims and (best is None or len(victims) < len(best[1])):
                best = (shard, victims)
        if best is None:
            return False
        self._preempt(*best)
        return True

    def _preempt(self, shard: ShardLedger, victims: list[Resident]) -> None:
        """Take the cells of ``victims``. They wait for their next stay, in their old order."""
        saved = [resident for resident in victims if choose_how(shard, resident) is Preemption.SWAP]
        for resident in victims:
            if resident not in saved:
                shard.cancel(resident)
                self._state.wait_again(resident.sequence)
                self._state.outbox.add(Preempt(resident.request_id, Preemption.RECOMPUTE))
        self._save(shard, saved, release=True)

    # Saving, and the layout

    def _save(self, shard: ShardLedger, residents: list[Resident], *, release: bool) -> None:
        entries = shard.save(residents, release=release) if residents else []
        if not entries:
            return
        command = Save(
            shard=shard.name,
            command_id=next(self._command_ids),
            header=shard.next_header,
            entries=tuple(entries),
        )
        ids = {entry.sequence_id for entry in entries}
        shard.send(command, [resident for resident in residents if resident.sequence_id in ids])
        self._state.outbox.add(command)

    def _first_to_fit(self, now: float) -> Sequence | None:
        """Return the first waiting request if a shard may change its layout for it."""
        waiting = self._state.waiting
        if not len(waiting) or all(shard.limits.other_layout is None for shard in self._state.shards.values()):
            return None
        return waiting.ordered(now)[0]

    def _wants_other_layout(self, shard: ShardLedger, first: Sequence | None, now: float) -> bool:
        if needs_other_layout(shard, None):
            return True
        if first is not None and needs_other_layout(shard, first):
            # One shard changes its layout for it, the one that this disturbs least.
            able = [one for one in self._state.shards.values() if one.could_ever_hold(first)]
            ready = any(one.could_hold_now(first) for one in able)
            return not ready and shard is min(able, key=lambda one: len(one.residents))
        return may_return(shard, first, self._state.lengths, now)

    def _change_layout(self, shard: ShardLedger) -> None:
        """Change to the other layout, once everything that is kept of ended sequences is saved."""
        parked = list(shard.parked.values()) if shard.can_save else []
        self._save(shard, parked, release=True)
        if not shard.can_command:
            return
        shard.evict_all()
        other = shard.limits.other_layout
        assert other is not None
        command = SetLayout(
            shard=shard.name,
            command_id=next(self._command_ids),
            header=shard.next_header,
            shares_cells=other.shares_cells,
        )
        shard.send(command, shard.residents.values())
        self._state.outbox.add(command)

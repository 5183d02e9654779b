"""Decides what every shard does next: who is preempted, who starts, what the next step carries."""

import functools
from collections.abc import Collection

from caravan_proto.messages.commands import FilterBatch, Save, SetLayout
from caravan_scheduler.actions import Joins, Preempt, Preemption
from caravan_scheduler.config import PrefillMode
from caravan_scheduler.planning.admission import Admission, StepPlans, begin_encoding
from caravan_scheduler.planning.bulk import crowding
from caravan_scheduler.planning.forecast import CellForecast
from caravan_scheduler.planning.layout import immovable, may_return, needs_other_layout
from caravan_scheduler.planning.moving import finish_drains, how_to_move, to_move
from caravan_scheduler.planning.placement import Place
from caravan_scheduler.planning.preemption import choose_how, victims_of_growth, victims_of_priority
from caravan_scheduler.planning.shard_index import ShardIndex
from caravan_scheduler.planning.step_plan import PlanInput, StepPlan
from caravan_scheduler.planning.waiting_reason import Why, why_waiting
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import copy_s, find_match, worth_copying
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.state import SchedulerState
from caravan_scheduler.waiting.queue import NotNow

# Cells that one Save copies while sequences run: some 12 ms for a small model.
_MOST_CELLS_AT_ONCE = 2048
# A Save that only closes a gap between ids may delay a step by so many seconds.
_SHORT_S = 0.05
# A shard counts as idle when its last sequence ended this long ago, in seconds: a client may ask again at once.
_IDLE_S = 0.2
# If no other request has come for so many seconds, bulk work takes longer steps.
_QUIET_S = 15.0


def to_save(shard: ShardAccount, now: float, waiting: int) -> list[Resident]:
    """Return the parked sequences that the next command should save, least recently used first.

    In the unified layout their cells slow down every step, so they are saved and released at once unless requests wait,
    which may start from them: what was saved meanwhile is released after that. In the split layout they are saved while
    the shard is idle, when every id that could be taken holds something that is not saved, and where their ids are
    between those of running sequences: each gap there takes a pass of its own, and is closed when a request starts. A
    shard that drains saves everything once its last sequence has gone. What does not make way for others is saved at
    once.
    """
    if not shard.saves.are_possible:
        return []
    unsaved = [resident for resident in shard.stays.parked.values() if not resident.is_expendable]
    if shard.drain.has_begun:
        return [] if shard.stays.residents else unsaved
    if kept := [resident for resident in unsaved if resident.is_to_be_saved]:
        return kept[:1]
    if shard.layout.shares_cells and not waiting:
        return _within(list(shard.stays.parked.values()), _MOST_CELLS_AT_ONCE)
    if not unsaved:
        return []
    highest = max(shard.stays.residents, default=-1)
    below = (resident for resident in unsaved if resident.sequence_id < highest)
    if between := [resident for resident in below if copy_s(shard, resident.computed) <= _SHORT_S]:
        return [min(between, key=lambda resident: resident.sequence_id)]
    can_take = bool(shard.stays.free_ids or shard.stays.releasing) or len(unsaved) < len(shard.stays.parked)
    is_idle = not shard.stays.residents and not shard.commands.in_flight and now - unsaved[-1].last_used_s >= _IDLE_S
    if can_take and not is_idle:
        return []
    return unsaved[:1]


def _within(residents: list[Resident], cells: int) -> list[Resident]:
    """Return the first of ``residents`` with at most ``cells`` cells together, and at least one."""
    found: list[Resident] = []
    for resident in residents:
        cells -= resident.computed
        if found and cells < 0:
            break
        found.append(resident)
    return found


def releases(shard: ShardAccount, waiting: int) -> bool:
    """Whether parked sequences are released when they are saved."""
    return shard.drain.has_begun or (shard.layout.shares_cells and not waiting)


class Planner:
    """Plans the next commands from ``state``, and numbers them."""

    def __init__(self, state: SchedulerState, last_command_id: int = 0) -> None:
        """``last_command_id``: that of the planner before it, if there was one."""
        self._state = state
        self._index = ShardIndex(state.shards, state.clock, state.lengths)
        self.last_command_id = last_command_id

    def _next_id(self) -> int:
        self.last_command_id += 1
        return self.last_command_id

    def plan(self, now: float, *, preempted: bool) -> None:
        """Send a command to every shard that should get one.

        ``preempted``: whether requests lost their cells in this call of the scheduler; then no other is admitted.
        """
        finish_drains(self._state)
        changes = self._state.take_changes()
        for name, may_start in changes.items():
            self._index.update(name, may_start=may_start)
        self._requeue(changes)
        may_admit = self._may_admit(changes)
        shards = self._to_plan(changes, may_admit=may_admit, now=now)
        first = self._first_to_fit(now) if shards else None
        for shard in shards:
            # They cannot come back in this plan, so that others may be admitted.
            self._recompute(shard, crowding(shard, now, self._state.config.aging_s))
            victims = victims_of_growth(shard)
            if victims:
                self._preempt(shard, victims)
                preempted = True
            elif movers := to_move(self._state, shard, now):
                if shard.commands.in_flight:
                    self._stop_decode(shard)
                else:
                    self._preempt(shard, movers)
            elif self._wants_other_layout(shard, first, now):
                self._change_layout(shard)
            elif paused := shard.checkpoints.pass_reached(shard.runs):
                self._save(shard, paused, release=False)
            else:
                waiting = len(self._state.waiting)
                self._save(shard, to_save(shard, now, waiting), release=releases(shard, waiting))
            if not shard.commands.can_begin:
                self._index.update(shard.name, may_start=False)
        if may_admit and not preempted:
            self._admit(shards, now)
        else:
            self._send(self._plans(shards, now), now)

    def reason_to_wait(self, sequence: Sequence) -> Why:
        """Return what ``sequence``, which is in the queue, waits for."""
        return why_waiting(sequence, self._state, self._index)

    def _requeue(self, changes: Collection[str]) -> None:
        """Let requests wait in the queue again that waited for a shard and need no longer."""
        waiting, index = self._state.waiting, self._index
        for sequence in index.queues.pop_all() if waiting.is_due else index.pop_queued(changes):
            waiting.requeue(sequence)

    def _may_admit(self, changes: Collection[str]) -> bool:
        """Whether something happened that may let a waiting request start."""
        waiting = self._state.waiting
        if not waiting.is_anyone_asked_for:
            return False
        # In pause mode the mere number of steps lets requests start.
        is_step_enough = self._state.config.mode is PrefillMode.PAUSE and len(changes) > 0
        return waiting.is_due or waiting.has_new or is_step_enough or bool(self._index.open.due)

    def _to_plan(self, changes: Collection[str], *, may_admit: bool, now: float) -> list[ShardLedger]:
        """Return the shards that may get a command for another reason than a request that starts."""
        shards = self._state.shards
        first = self._first_to_fit(now) if may_admit else None
        if first is not None and not any(shard.capacity.could_hold_now(first) for shard in shards.values()):
            # A shard has to change its layout for it, whichever that is.
            return [shard for shard in shards.values() if shard.commands.can_begin]
        changed = [shards[name] for name in changes if name in shards]
        return [shard for shard in changed if shard.commands.can_begin and (may_admit or self._needs_plan(shard, now))]

    def _needs_plan(self, shard: ShardLedger, now: float) -> bool:
        """Whether ``shard``, which can take a command, should get one. Runs after every step: keep it cheap."""
        if not shard.commands.in_flight or shard.header.is_urgent:
            return True
        return bool(to_save(shard, now, len(self._state.waiting)) or to_move(self._state, shard, now))

    def _plans(self, shards: list[ShardLedger], now: float, adapter: str | None = None) -> StepPlans:
        """Return plans of which that of each shard that can take a command is made. ``adapter``: see `PlanInput`."""
        waiting = len(self._state.waiting)
        plans = StepPlans(lambda shard: self._plan(shard, now, waiting, adapter))
        for shard in shards:
            if shard.commands.can_begin:
                _ = plans[shard]
        return plans

    def _plan(self, shard: ShardLedger, now: float, waiting: int, adapter: str | None) -> StepPlan:
        config, lengths = self._state.config, self._state.lengths
        urgent = min(waiting, self._state.waiting.urgent)
        is_quiet = now - self._state.waiting.urgent_came_s >= _QUIET_S
        given = PlanInput(
            config=config,
            lengths=lengths,
            now=now,
            waiting=waiting,
            urgent=urgent,
            is_fleet_idle=self._state.lowest_priority is None,
            bulk_step_s=config.target_itl_s if is_quiet else config.bulk_step_s,
            adapter=adapter,
        )
        return StepPlan(shard, given)

    # Admission

    def _admit(self, shards: list[ShardLedger], now: float) -> None:
        """Start the requests that the shards can take, or preempt for the first; then send the shards' commands."""
        state, index = self._state, self._index
        index.begin_plan(waiting=len(state.waiting), anew=state.waiting.is_due)
        first = state.waiting.begin_admission(now)
        adapter = first.spec.adapter
        admission = Admission(state, index, self._plans(shards, now, adapter))
        place = admission.place_for(first)
        preempted = None
        if not isinstance(place, Place) and place is not NotNow.PREFIX_COMING:
            preempted = self._preempt_for(first)
        if preempted is not None:
            index.update(preempted.name, may_start=True)
            admission = Admission(state, index, self._plans([*shards, preempted], now, adapter))
            place = admission.choose(first)
        # After a preemption, nothing needs to be saved before it starts.
        if isinstance(place, Place) and not admission.waits_for_media(first, place):
            state.waiting.remove(first)
            admission.start(first, place)
        while preempted is None and (placed := state.waiting.pop_fitting(admission.place_for, now)) is not None:
            admission.start(*placed)
        admission.end(all_asked=preempted is None)
        self._send(admission.plans, now)

    def _send(self, plans: StepPlans, now: float) -> None:
        for plan in plans.values():
            if plan.is_idle:  # no request could start for which the step was kept
                plan = self._plan(plan.shard, now, waiting=0, adapter=None)
            command = plan.send(self._next_id())
            for resident in plan.branched:
                self._state.branch(resident.sequence, plan.shard, resident)
            if command is not None:
                if plan.join_reason is not None:
                    self._state.outbox.add(Joins(plan.join_reason))
                self._state.outbox.add(command)
            self._index.update(plan.shard.name, may_start=False)

    # Preemption

    def _preempt_for(self, sequence: Sequence) -> ShardLedger | None:
        """Preempt lower priorities for ``sequence`` where that takes the fewest. Return the shard; None if nowhere."""
        lowest = self._state.lowest_priority
        if lowest is None or lowest >= sequence.spec.priority:
            return None
        best: tuple[ShardLedger, list[Resident]] | None = None
        for shard in self._state.shards.values():
            if not self._could_preempt(shard, sequence):
                continue
            forecast = functools.partial(CellForecast, shard, self._state.lengths, self._state.config.watermark)
            victims = victims_of_priority(shard, sequence, forecast)
            if victims and (best is None or len(victims) < len(best[1])):
                best = (shard, victims)
        if best is None:
            return None
        shard, residents = best
        if sequence.spec.media is not None and begin_encoding(
            self._state, sequence, shard, worth_copying(shard, find_match(shard, sequence)).length
        ):
            return None  # it takes their place when its media are encoded
        self._preempt(shard, residents)
        return shard

    def _could_preempt(self, shard: ShardLedger, sequence: Sequence) -> bool:
        adapter = sequence.spec.adapter
        if not shard.commands.can_begin or shard.commands.turn.next(shard.stays.adapters | {adapter}) != adapter:
            return False
        return any(resident.priority < sequence.spec.priority for resident in shard.stays.residents.values())

    def _preempt(self, shard: ShardLedger, victims: list[Resident]) -> None:
        """Take the cells of ``victims``. They wait for their next stay, in their old order."""
        saved = [resident for resident in victims if self._how(shard, resident) is Preemption.SWAP]
        self._recompute(shard, [resident for resident in victims if resident not in saved])
        self._save(shard, saved, release=True)

    def _recompute(self, shard: ShardLedger, victims: Collection[Resident]) -> None:
        for resident in victims:
            # The beams of a search lose their cells with the first of them.
            if resident.is_live:
                shard.cancel(resident)
                self._state.wait_again(resident.sequence)
                self._state.outbox.add(Preempt(resident.request_id, Preemption.RECOMPUTE))

    def _stop_decode(self, shard: ShardLedger) -> None:
        """End the Decode under way. What it computes until then counts, so that all of it can be saved afterwards."""
        command = FilterBatch(
            shard=shard.name,
            command_id=self._next_id(),
            header=shard.header.message,
            keep=tuple(sorted((*shard.stays.residents, *shard.stays.parked))),
        )
        shard.send(command, [])
        self._state.outbox.add(command)

    def _how(self, shard: ShardLedger, resident: Resident) -> Preemption:
        return how_to_move(self._state, shard, resident) if shard.drain.has_begun else choose_how(shard, resident)

    # Saving, and the layout

    def _save(self, shard: ShardLedger, residents: list[Resident], *, release: bool) -> None:
        entries = shard.save(residents, release=release) if residents else []
        if not entries:
            return
        command = Save(
            shard=shard.name,
            command_id=self._next_id(),
            header=shard.header.message,
            entries=tuple(entries),
        )
        ids = {entry.sequence_id for entry in entries}
        shard.send(command, [resident for resident in residents if resident.sequence_id in ids])
        self._state.outbox.add(command)

    def _first_to_fit(self, now: float) -> Sequence | None:
        """Return the first waiting request if a shard may change its layout for it."""
        waiting = self._state.waiting
        if not waiting.is_anyone_asked_for or not self._index.open.with_two_layouts:
            return None
        return next(waiting.in_order(now))

    def _wants_other_layout(self, shard: ShardLedger, first: Sequence | None, now: float) -> bool:
        if needs_other_layout(shard, None):
            return True
        if first is not None and needs_other_layout(shard, first):
            # One shard changes its layout for it, the one that this disturbs least.
            able = [one for one in self._state.shards.values() if one.capacity.could_ever_hold(first)]
            ready = any(one.capacity.could_hold_now(first) for one in able)
            return not ready and shard is min(able, key=lambda one: len(one.stays.residents))
        return may_return(shard, first, self._state.lengths, now)

    def _change_layout(self, shard: ShardLedger) -> None:
        """Change to the other layout, once what is kept of ended sequences is saved. If it cannot be, it moves."""
        other = shard.capacity.limits.other_layout
        assert other is not None
        if shard.saves.are_possible:
            self._save(shard, list(shard.stays.parked.values()), release=True)
            if not shard.commands.can_begin:
                return
        shard.evict(immovable(shard, other))
        command = SetLayout(
            shard=shard.name,
            command_id=self._next_id(),
            header=shard.header.message,
            layout=other.layout,
        )
        shard.send(command, shard.stays.residents.values())
        self._state.outbox.add(command)

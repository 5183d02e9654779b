"""Decides what every shard does next: who is preempted, who is let in, what the next pass carries."""

import functools
import math

from caravan_router.scheduling.actions import Preempt, Preemption, Start, SwapOut, SwapOutEntry
from caravan_router.scheduling.config import PrefillMode
from caravan_router.scheduling.planning.forecast import CellForecast
from caravan_router.scheduling.planning.placement import Place, choose
from caravan_router.scheduling.planning.preemption import choose_how, victims_of_growth, victims_of_priority
from caravan_router.scheduling.planning.step_plan import Draft, Outside
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.command import InFlight, Kind
from caravan_router.scheduling.shard.ledger import ShardState
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.state import SchedulerState
from caravan_router.scheduling.waiting.queue import Hold

# What a prompt token costs a tenant.
_PROMPT_TOKEN = 1.0


class Planner:
    """Plans from ``state`` as it is; numbers the commands and the swapped sequences."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._last_command_id = 0
        self._last_handle = 0

    def plan(self, now: float, *, preempted: bool) -> None:
        """Add the commands for every shard that can take one.

        Nobody is admitted in a step that ``preempted``, but for the one request that others were preempted for.
        """
        # In pause mode it is the mere number of passes that lets somebody in.
        self._state.queue_is_due = self._state.queue_is_due or self._state.config.mode is PrefillMode.PAUSE
        shards = [shard for shard in self._state.shards.values() if self._needs_plan(shard)]
        if not shards:
            return
        for shard in shards:
            victims = victims_of_growth(shard)
            if victims:
                self._preempt(shard, victims)
                preempted = True
        if not preempted and len(self._state.waiting):
            preempted = self._admit(shards, now)
        else:
            self._send(self._drafts(shards, now), now)

    def _needs_plan(self, shard: ShardState) -> bool:
        """Cheap, since it is asked for every shard after every pass of any."""
        return shard.can_command and (
            not shard.in_flight or shard.release_now or (self._state.queue_is_due and len(self._state.waiting) > 0)
        )

    def _drafts(self, shards: list[ShardState], now: float, first: Sequence | None = None) -> list[Draft]:
        """``first``: of those that wait."""
        adapter = None if first is None else first.spec.adapter
        outside = Outside(waiting=len(self._state.waiting), adapter=adapter, now=now)
        return [self._draft(shard, outside) for shard in shards if shard.can_command]

    def _draft(self, shard: ShardState, outside: Outside) -> Draft:
        return Draft(shard, self._state.config, self._state.lengths, outside)

    def _admit(self, shards: list[ShardState], now: float) -> bool:
        """Let in whom the shards can take, then send their commands; whether somebody was preempted instead."""
        self._state.queue_is_due = False
        first = self._state.waiting.ordered(now)[0]
        drafts = self._drafts(shards, now, first)
        blocked = -math.inf

        def place_for(sequence: Sequence) -> Place | Hold | None:
            nonlocal blocked
            if sequence.spec.priority < blocked:
                return None  # else what was preempted for a higher priority would take its place back
            place = choose(drafts, self._state.shards.values(), sequence)
            if place is None:
                blocked = max(blocked, sequence.spec.priority)
            return place

        open_to_first = [draft.shard for draft in drafts if draft.adapter == first.spec.adapter]
        if place_for(first) is None and self._preempt_for(first, open_to_first):
            drafts = self._drafts(shards, now, first)
            place = choose(drafts, self._state.shards.values(), first)
            if isinstance(place, Place):  # nothing needs to be saved before it begins
                self._state.waiting.remove(first)
                self._start(first, place)
            self._send(drafts, now)
            return True
        while (placed := self._state.waiting.pop_fitting(place_for, now)) is not None:
            self._start(*placed)
        self._send(drafts, now)
        return False

    def _start(self, sequence: Sequence, place: Place) -> None:
        draft, request = place.draft, sequence.request
        if place.restore:
            resident = draft.restore(sequence, place.match)
        else:
            self._state.drop_ticket(sequence)
            resident = draft.admit(sequence, place.match)
            uncharged = max(0, resident.target - max(resident.computed, sequence.charged))
            sequence.charged = resident.target
            self._state.fair_share.charge(request.spec.tenant, _PROMPT_TOKEN * uncharged)
        self._state.residents[request.request_id] = (draft.shard, resident)
        if not sequence.started:
            sequence.started = True
            self._state.outbox.add(Start(request.request_id, len(request.spec.prompt), cached_tokens=resident.shared))

    def _send(self, drafts: list[Draft], now: float) -> None:
        for draft in drafts:
            if draft.is_idle:  # nobody could be let in for whom the pass was kept
                draft = self._draft(draft.shard, Outside(waiting=0, adapter=None, now=now))
            command = draft.finish(self._last_command_id + 1)
            if command is not None:
                self._last_command_id += 1
                self._state.outbox.add(command)

    # Preemption

    def _preempt_for(self, sequence: Sequence, shards: list[ShardState]) -> bool:
        """Take the place of lower priorities, where that takes the fewest."""
        best: tuple[int, ShardState, list[Resident]] | None = None
        for shard in shards:
            if all(resident.priority >= sequence.spec.priority for resident in shard.residents.values()):
                continue
            forecast = functools.partial(CellForecast, shard, self._state.lengths, self._state.config.watermark)
            victims = victims_of_priority(shard, sequence, shard.match(sequence).live_length, forecast)
            if victims and (best is None or len(victims) < best[0]):
                best = (len(victims), shard, victims)
        if best is None:
            return False
        self._preempt(best[1], best[2])
        return True

    def _preempt(self, shard: ShardState, victims: list[Resident]) -> None:
        """Take the cells of ``victims``; they wait to go on, in their old order."""
        leaving: dict[int, Resident] = {}
        swaps: dict[int, tuple[int, int]] = {}
        for resident in victims:
            others = frozenset(victim.sequence_id for victim in victims)
            kept = 0
            if shard.limits.shares_cells and not shard.limits.whole_only and resident.begun:
                kept = shard.tree.shared_length(resident.sequence_id, others)
            if choose_how(shard, resident, kept) is Preemption.SWAP:
                self._last_handle += 1
                leaving[resident.sequence_id] = resident
                swaps[resident.sequence_id] = (self._last_handle, kept)
            else:
                shard.cancel(resident)
                self._state.wait_again(resident.sequence)
                self._state.outbox.add(Preempt(resident.sequence.request_id, Preemption.RECOMPUTE))
        if not leaving:
            return
        for resident in leaving.values():
            shard.leave(resident)
        self._last_command_id += 1
        shard.in_flight.append(
            InFlight(command_id=self._last_command_id, kind=Kind.SWAP_OUT, residents=leaving, swaps=swaps)
        )
        self._state.outbox.add(
            SwapOut(
                shard=shard.name,
                command_id=self._last_command_id,
                header=shard.take_header(),
                entries=tuple(
                    SwapOutEntry(sequence_id=sequence_id, handle=handle, start=start)
                    for sequence_id, (handle, start) in swaps.items()
                ),
            )
        )

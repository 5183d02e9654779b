"""The scheduler: a function of its state, the events and the time, to a list of actions.

Every command is planned from the whole picture at the moment a shard can take one; nothing is committed earlier.
Plan, execute (the shell), apply (the next events).
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, assert_never

from caravan_router.scheduling.actions import (
    Action,
    Emit,
    Fail,
    FailureReason,
    Preempt,
    Preemption,
    Start,
    SwapOut,
    SwapOutEntry,
)
from caravan_router.scheduling.deadlines import Deadlines
from caravan_router.scheduling.draft import Draft
from caravan_router.scheduling.events import (
    Cancelled,
    CommandEnded,
    Event,
    Row,
    ShardDraining,
    ShardJoined,
    ShardLost,
    StepOutcome,
    Stepped,
    Submitted,
    SwappedIn,
    SwappedOut,
    Tick,
)
from caravan_router.scheduling.fair_share import FairShare
from caravan_router.scheduling.in_flight import InFlight, Kind
from caravan_router.scheduling.output_length import OutputLengths
from caravan_router.scheduling.placement import Place, choose
from caravan_router.scheduling.policy import PrefillMode, SchedulerConfig
from caravan_router.scheduling.preemption import choose_how, victims_of_growth, victims_of_priority
from caravan_router.scheduling.queue import Hold, WaitingQueue
from caravan_router.scheduling.sequence import Request, Resident, Sequence, SwapTicket
from caravan_router.scheduling.shard_state import ShardState
from caravan_router.scheduling.tokens import GeneratedToken

if TYPE_CHECKING:
    from caravan_router.scheduling.tenant import Tenant

# What a token costs a tenant, as in the paper on virtual token counters: one that is generated takes a pass of its own.
_PROMPT_TOKEN = 1.0
_OUTPUT_TOKEN = 2.0


class Scheduler:
    """One queue, any number of shards, every step decided here. ``now`` is in seconds and never goes back."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._fair_share = FairShare()
        self._lengths = OutputLengths()
        self.waiting = WaitingQueue(config.max_bypass, config.aging_s, self._fair_share)
        self.shards: dict[str, ShardState] = {}
        # Every request that has not ended: waiting, or resident somewhere.
        self.sequences: dict[int, Sequence] = {}
        self._residents: dict[int, tuple[ShardState, Resident]] = {}
        self._tenants: dict[str, tuple[Tenant, int]] = {}
        self._deadlines = Deadlines()
        self._last_command_id = 0
        self._last_handle = 0
        self._no_shard_since: float | None = None
        # Something happened since the queue was last looked through that may let somebody in.
        self._queue_is_due = True

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Apply what happened, then plan what shards do next."""
        actions: list[Action] = []
        emitted: list[tuple[int, GeneratedToken]] = []
        preempted = False
        for event in events:
            if not isinstance(event, Stepped | Tick):
                self._queue_is_due = True
            match event:
                case Submitted():
                    self._submit(event.request, actions)
                case Cancelled():
                    self._cancel(event.request_id)
                case ShardJoined():
                    self._join(event, actions)
                case ShardLost():
                    self._lose(event.shard, actions)
                case ShardDraining():
                    if event.shard in self.shards:
                        self.shards[event.shard].draining = True
                case Stepped():
                    preempted |= self._apply_step(event, emitted, actions)
                case SwappedOut():
                    self._apply_swap_out(event, actions)
                case SwappedIn():
                    self._apply_swap_in(event, actions)
                case CommandEnded():
                    self._end_command(event)
                case Tick():
                    pass
                case _:
                    assert_never(event)
        if emitted:
            actions.insert(0, Emit(tuple(emitted)))  # before a failure of the same request
        self._fail_late(now, actions)
        self._fail_hopeless(now, actions)
        self._plan(now, actions, preempted=preempted)
        return actions

    # Requests

    def _submit(self, request: Request, actions: list[Action]) -> None:
        assert request.request_id not in self.sequences, f"request {request.request_id} was submitted before"
        sequence = Sequence(request)
        self._enter(request)
        self.sequences[request.request_id] = sequence
        self.waiting.push(sequence)
        if self.shards:
            self._fail_unplaceable([sequence], actions)

    def _enter(self, request: Request) -> None:
        tenant = request.tenant
        _, active = self._tenants.get(tenant.name, (tenant, 0))
        if active == 0:
            self._fair_share.activate(tenant, [other for other, _ in self._tenants.values()])
        self._tenants[tenant.name] = (tenant, active + 1)
        self._deadlines.add(request)

    def _forget(self, request_id: int) -> Sequence:
        """The request has ended."""
        sequence = self.sequences.pop(request_id)
        tenant, active = self._tenants.pop(sequence.request.tenant.name)
        if active > 1:
            self._tenants[tenant.name] = (tenant, active - 1)
        return sequence

    def _fail_unplaceable(self, sequences: list[Sequence], actions: list[Action]) -> None:
        """End those of the waiting ``sequences`` that fit no shard even when it is empty."""
        for sequence in sequences:
            if not any(shard.could_ever_hold(sequence) for shard in self.shards.values()):
                self._fail(sequence.request.request_id, FailureReason.DOES_NOT_FIT, actions)

    def _cancel(self, request_id: int) -> None:
        if request_id not in self.sequences:
            return  # it ended while the cancellation was on its way
        self._queue_is_due = True
        sequence = self._forget(request_id)
        if request_id in self._residents:
            shard, resident = self._residents.pop(request_id)
            shard.cancel(resident)
        else:
            self.waiting.remove(sequence)
            self._drop_ticket(sequence)

    def _drop_ticket(self, sequence: Sequence) -> None:
        """What a shard saved of it is of no more use."""
        ticket, sequence.ticket = sequence.ticket, None
        if ticket is not None and ticket.shard in self.shards:
            self.shards[ticket.shard].drop_handles.append(ticket.handle)

    def _fail(self, request_id: int, reason: FailureReason, actions: list[Action]) -> None:
        self._cancel(request_id)
        actions.append(Fail(request_id, reason))

    def _fail_late(self, now: float, actions: list[Action]) -> None:
        """End requests whose time is over."""
        for request_id, reason in self._deadlines.due(now):
            sequence = self.sequences.get(request_id)
            if sequence is not None and not (reason is FailureReason.QUEUE_TIMEOUT and sequence.started):
                self._fail(request_id, reason, actions)

    def _fail_hopeless(self, now: float, actions: list[Action]) -> None:
        """End waiting requests that no shard came back for in time."""
        if self.shards:
            self._no_shard_since = None
            return
        if self._no_shard_since is None:
            self._no_shard_since = now
        if now - self._no_shard_since >= self._config.no_shard_grace_s:
            for sequence in list(self.waiting):
                self._fail(sequence.request.request_id, FailureReason.NO_SHARD, actions)

    # Shards

    def _join(self, event: ShardJoined, actions: list[Action]) -> None:
        self._lose(event.shard, actions)  # a shard that joins is empty, whatever was thought of it
        self.shards[event.shard] = ShardState(event.shard, event.limits, self._config)
        self._fail_unplaceable(list(self.waiting), actions)

    def _lose(self, name: str, actions: list[Action]) -> None:
        shard = self.shards.pop(name, None)
        if shard is None:
            return
        for sequence in self.waiting:
            if sequence.ticket is not None and sequence.ticket.shard == name:
                sequence.ticket = None
        for resident in (*shard.residents.values(), *shard.leaving.values()):
            if resident.live:
                resident.live = False
                self._take_back(resident.sequence, actions)

    def _take_back(self, sequence: Sequence, actions: list[Action]) -> None:
        """Queue a sequence again after it lost its cells by a failure: its tokens are computed anew."""
        self._wait_again(sequence)
        sequence.losses += 1
        if sequence.losses > self._config.max_losses:
            self._fail(sequence.request.request_id, FailureReason.NO_PROGRESS, actions)

    def _wait_again(self, sequence: Sequence) -> None:
        del self._residents[sequence.request.request_id]
        sequence.common.clear()
        self.waiting.push(sequence)

    # Results

    def _find_command(self, shard_name: str, command_id: int) -> tuple[ShardState, InFlight] | None:
        shard = self.shards.get(shard_name)
        if shard is not None:
            for command in shard.in_flight:
                if command.command_id == command_id:
                    return shard, command
        return None  # of an earlier life of the shard

    def _end_command(self, event: CommandEnded) -> None:
        found = self._find_command(event.shard, event.command_id)
        if found is not None:
            shard, command = found
            shard.in_flight.remove(command)

    def _apply_step(self, event: Stepped, emitted: list[tuple[int, GeneratedToken]], actions: list[Action]) -> bool:
        """Apply a pass; whether it took cells from a request."""
        found = self._find_command(event.shard, event.command_id)
        if found is None:
            return False
        shard, command = found
        if event.outcome is not StepOutcome.OK:
            return self._fail_pass(shard, command, event.outcome, actions)
        command.steps_left -= 1
        if command.chunk_tokens:
            self._queue_is_due = True
            has_riders = len(command.chunk_tokens) < len(command.residents)
            cost = shard.mixed_cost if has_riders else shard.idle_cost
            cost.observe_chunk(sum(command.chunk_tokens.values()), event.seconds)
            for sequence_id, tokens in command.chunk_tokens.items():
                shard.advance(command.residents[sequence_id], tokens)
        else:
            shard.steps_since_prefill += 1
            shard.mixed_cost.observe_decode(event.seconds)
        for row in event.rows:
            self._apply_row(shard, command, row, emitted)
        return False

    def _apply_row(
        self, shard: ShardState, command: InFlight, row: Row, emitted: list[tuple[int, GeneratedToken]]
    ) -> None:
        resident = command.residents[row.sequence_id]
        if not resident.live:
            return  # cancelled while the shard was computing
        sequence = resident.sequence
        if row.sequence_id not in command.chunk_tokens:
            shard.grow(resident)
        sequence.output.append(row.token.token_id)
        sequence.losses = 0
        self._fair_share.charge(sequence.request.tenant, _OUTPUT_TOKEN)
        request_id = sequence.request.request_id
        emitted.append((request_id, row.token))
        if row.token.finish is not None:
            self._queue_is_due = True
            self._lengths.observe(len(sequence.output))
            shard.finish(resident)
            del self._residents[request_id]
            self._forget(request_id)

    def _fail_pass(self, shard: ShardState, command: InFlight, outcome: StepOutcome, actions: list[Action]) -> bool:
        """The pass changed nothing: prompts that were to begin wait again. Whether it took cells from others."""
        for sequence_id in command.chunk_tokens:
            resident = command.residents[sequence_id]
            if not resident.begun:
                was_live = resident.live
                shard.never_began(resident)
                if was_live:
                    self._wait_again(resident.sequence)
        command.chunk_tokens.clear()
        command.steps_left = 0
        return outcome is StepOutcome.NO_KV and self._make_room(shard, command, actions)

    def _make_room(self, shard: ShardState, command: InFlight, actions: list[Action]) -> bool:
        """The shard says its cache is full though the accounting says it is not: whoever is new there gives way."""
        if shard.parked:
            for sequence_id in list(shard.parked):
                shard.evict(sequence_id)
            return True
        live = [resident for resident in command.residents.values() if resident.live]
        if not live:
            return False
        victim = max(live, key=lambda resident: resident.sequence.request.request_id)
        shard.remove(victim)
        shard.release_now = True
        self._take_back(victim.sequence, actions)
        return True

    def _apply_swap_out(self, event: SwappedOut, actions: list[Action]) -> None:
        found = self._find_command(event.shard, event.command_id)
        if found is None:
            return
        shard, command = found
        cells = 0
        for (sequence_id, (handle, start)), saved in zip(command.swaps.items(), event.saved, strict=True):
            resident = command.residents[sequence_id]
            shard.left(resident)
            if saved:
                cells += resident.computed - start
            if not resident.live:
                if saved:
                    shard.drop_handles.append(handle)
                continue
            resident.live = False
            sequence = resident.sequence
            if saved:
                sequence.ticket = SwapTicket(
                    shard=shard.name, handle=handle, start=start, length=resident.computed, target=resident.target
                )
            self._wait_again(sequence)
            how = Preemption.SWAP if saved else Preemption.RECOMPUTE
            actions.append(Preempt(sequence.request.request_id, how))
        shard.swap_cost.observe(cells, event.seconds)

    def _apply_swap_in(self, event: SwappedIn, actions: list[Action]) -> None:
        found = self._find_command(event.shard, event.command_id)
        if found is None:
            return
        shard, command = found
        cells = 0
        for resident, restored in zip(command.residents.values(), event.restored, strict=True):
            if restored:
                resident.begun = True
                cells += resident.computed - resident.shared
                continue
            was_live = resident.live
            shard.never_began(resident)
            if was_live:
                self._take_back(resident.sequence, actions)
        shard.swap_cost.observe(cells, event.seconds)

    # Planning

    def _plan(self, now: float, actions: list[Action], *, preempted: bool) -> None:
        # In pause mode it is the mere number of passes that lets somebody in.
        self._queue_is_due = self._queue_is_due or self._config.mode is PrefillMode.PAUSE
        shards = [shard for shard in self.shards.values() if self._needs_plan(shard)]
        if not shards:
            return
        for shard in shards:
            victims = victims_of_growth(shard)
            if victims:
                self._preempt(shard, victims, actions)
                preempted = True
        if not preempted and len(self.waiting):
            preempted = self._admit(shards, now, actions)
        else:
            self._send(self._drafts(shards, now), actions)

    def _needs_plan(self, shard: ShardState) -> bool:
        """Cheap, since it is asked for every shard after every pass of any."""
        return shard.can_command and (
            not shard.in_flight or shard.release_now or (self._queue_is_due and len(self.waiting) > 0)
        )

    def _drafts(self, shards: list[ShardState], now: float) -> list[Draft]:
        waiting = len(self.waiting)
        return [
            Draft(shard, self._config, self._lengths, waiting=waiting, now=now) for shard in shards if shard.can_command
        ]

    def _admit(self, shards: list[ShardState], now: float, actions: list[Action]) -> bool:
        """Let in whom the shards can take, then send their commands; whether somebody was preempted instead."""
        drafts = self._drafts(shards, now)

        blocked = -math.inf

        def place_for(sequence: Sequence) -> Place | Hold | None:
            nonlocal blocked
            if sequence.request.priority < blocked:
                return None  # else what was preempted for a higher priority would take its place back
            place = choose(drafts, self.shards.values(), sequence)
            if place is None:
                blocked = max(blocked, sequence.request.priority)
            return place

        first = self.waiting.ordered(now)[0]
        if place_for(first) is None and self._preempt_for(first, shards, actions):
            self._send(self._drafts(shards, now), actions)
            return True
        while (placed := self.waiting.pop_fitting(place_for, now)) is not None:
            self._start(*placed, actions)
        self._send(drafts, actions)
        return False

    def _start(self, sequence: Sequence, place: Place, actions: list[Action]) -> None:
        draft, request = place.draft, sequence.request
        if place.restore:
            resident = draft.restore(sequence, place.match)
        else:
            self._drop_ticket(sequence)
            resident = draft.admit(sequence, place.match)
            self._fair_share.charge(request.tenant, _PROMPT_TOKEN * (resident.target - resident.computed))
        self._residents[request.request_id] = (draft.shard, resident)
        if not sequence.started:
            sequence.started = True
            actions.append(Start(request.request_id, len(request.prompt), cached_tokens=resident.shared))

    def _send(self, drafts: list[Draft], actions: list[Action]) -> None:
        for draft in drafts:
            command = draft.finish(self._last_command_id + 1)
            if command is not None:
                self._last_command_id += 1
                actions.append(command)

    # Preemption

    def _preempt_for(self, sequence: Sequence, shards: list[ShardState], actions: list[Action]) -> bool:
        """Take the place of lower priorities, where that takes the fewest."""
        best: tuple[int, ShardState, list[Resident]] | None = None
        for shard in shards:
            if all(resident.priority >= sequence.request.priority for resident in shard.residents.values()):
                continue
            victims = victims_of_priority(shard, sequence, shard.match(sequence).live_length)
            if victims and (best is None or len(victims) < best[0]):
                best = (len(victims), shard, victims)
        if best is None:
            return False
        self._preempt(best[1], best[2], actions)
        return True

    def _preempt(self, shard: ShardState, victims: list[Resident], actions: list[Action]) -> None:
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
                self._wait_again(resident.sequence)
                actions.append(Preempt(resident.sequence.request.request_id, Preemption.RECOMPUTE))
        if not leaving:
            return
        for resident in leaving.values():
            shard.leave(resident)
        self._last_command_id += 1
        shard.in_flight.append(
            InFlight(command_id=self._last_command_id, kind=Kind.SWAP_OUT, residents=leaving, swaps=swaps)
        )
        actions.append(
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

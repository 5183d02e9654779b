"""The scheduler: a function of its state, the events and the time, to a list of actions.

Every command is planned from the whole picture at the moment a shard can take one; nothing is committed earlier.
Plan, execute (the shell), apply (the next events).
"""

from collections.abc import Iterable
from typing import assert_never

from caravan_router.core.tokens import GeneratedToken
from caravan_router.scheduling.actions import Action, Fail, FailureReason, Preempt, Preemption
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import (
    Cancelled,
    CommandEnded,
    Event,
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
from caravan_router.scheduling.planning.planner import Planner
from caravan_router.scheduling.sequence import Request, Sequence, SwapTicket
from caravan_router.scheduling.shard.command import InFlight
from caravan_router.scheduling.shard.ledger import ShardState
from caravan_router.scheduling.state import SchedulerState
from caravan_router.scheduling.waiting.queue import WaitingQueue

# What a generated token costs a tenant, as in the paper on virtual token counters: it takes a pass of its own.
_OUTPUT_TOKEN = 2.0


class Scheduler:
    """One queue, any number of shards, every step decided here. ``now`` is in seconds and never goes back."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._state = SchedulerState(config)
        self._planner = Planner(self._state)
        self._no_shard_since: float | None = None

    @property
    def waiting(self) -> WaitingQueue:
        """Requests that no shard has taken."""
        return self._state.waiting

    @property
    def shards(self) -> dict[str, ShardState]:
        """Those that are leased, by name."""
        return self._state.shards

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Every request that has not ended: waiting, or resident somewhere."""
        return self._state.sequences

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Apply what happened, then plan what shards do next."""
        preempted = False
        for event in events:
            if not isinstance(event, Stepped | Tick):
                self._state.queue_is_due = True
            match event:
                case Submitted():
                    self._submit(event.request)
                case Cancelled():
                    self._cancel(event.request_id)
                case ShardJoined():
                    self._join(event)
                case ShardLost():
                    self._lose(event.shard)
                    self._fail_unplaceable(list(self.waiting))
                case ShardDraining():
                    if event.shard in self.shards:
                        self.shards[event.shard].draining = True
                case Stepped():
                    preempted |= self._apply_step(event)
                case SwappedOut():
                    self._apply_swap_out(event)
                case SwappedIn():
                    self._apply_swap_in(event)
                case CommandEnded():
                    self._end_command(event)
                case Tick():
                    pass
                case _:
                    assert_never(event)
        self._fail_late(now)
        self._fail_hopeless(now)
        self._planner.plan(now, preempted=preempted)
        return self._state.outbox.drain()

    # Requests

    def _submit(self, request: Request) -> None:
        assert request.request_id not in self.sequences, f"request {request.request_id} was submitted before"
        sequence = self._state.enter(request)
        self._fail_unplaceable([sequence])

    def _fail_unplaceable(self, sequences: list[Sequence]) -> None:
        """End the waiting ``sequences`` that fit no shard even when it is empty. Without any shard they may wait."""
        for sequence in sequences if self.shards else ():
            if not any(shard.could_ever_hold(sequence) for shard in self.shards.values()):
                self._fail(sequence.request_id, FailureReason.DOES_NOT_FIT)

    def _cancel(self, request_id: int) -> None:
        if request_id not in self.sequences:
            return  # it ended while the cancellation was on its way
        sequence = self._state.forget(request_id)
        if request_id in self._state.residents:
            shard, resident = self._state.residents.pop(request_id)
            shard.cancel(resident)
        else:
            self.waiting.remove(sequence)
            self._state.drop_ticket(sequence)

    def _fail(self, request_id: int, reason: FailureReason) -> None:
        self._cancel(request_id)
        self._state.outbox.add(Fail(request_id, reason))

    def _fail_late(self, now: float) -> None:
        """End requests whose time is over."""
        for request_id, reason in self._state.deadlines.due(now):
            sequence = self.sequences.get(request_id)
            if sequence is not None and not (reason is FailureReason.QUEUE_TIMEOUT and sequence.started):
                self._fail(request_id, reason)

    def _fail_hopeless(self, now: float) -> None:
        """End waiting requests that no shard came back for in time."""
        if self.shards:
            self._no_shard_since = None
            return
        if self._no_shard_since is None:
            self._no_shard_since = now
        if now - self._no_shard_since >= self._state.config.no_shard_grace_s:
            for sequence in list(self.waiting):
                self._fail(sequence.request_id, FailureReason.NO_SHARD)

    # Shards

    def _join(self, event: ShardJoined) -> None:
        self._lose(event.shard)  # a shard that joins is empty, whatever was thought of it
        self.shards[event.shard] = ShardState(event.shard, event.limits, self._state.config)
        self._fail_unplaceable(list(self.waiting))

    def _lose(self, name: str) -> None:
        shard = self.shards.pop(name, None)
        if shard is None:
            return
        for sequence in self.waiting:
            if sequence.ticket is not None and sequence.ticket.shard == name:
                sequence.ticket = None
        for resident in (*shard.residents.values(), *shard.leaving.values()):
            if resident.live:
                resident.live = False
                self._take_back(resident.sequence)

    def _take_back(self, sequence: Sequence) -> None:
        """Queue a sequence again after it lost its cells by a failure: its tokens are computed anew."""
        self._state.wait_again(sequence)
        sequence.losses += 1
        if sequence.losses > self._state.config.max_losses:
            self._fail(sequence.request_id, FailureReason.NO_PROGRESS)

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

    def _apply_step(self, event: Stepped) -> bool:
        """Apply a pass; whether it took cells from a request."""
        found = self._find_command(event.shard, event.command_id)
        if found is None:
            return False
        shard, command = found
        if event.outcome is not StepOutcome.OK:
            return self._fail_pass(shard, command, event.outcome)
        command.steps_left -= 1
        if shard.turn.count_pass():
            self._state.queue_is_due = True  # for whoever waits for another adapter
        if command.chunk_tokens:
            self._state.queue_is_due = True
            has_riders = len(command.chunk_tokens) < len(command.residents)
            cost = shard.mixed_cost if has_riders else shard.idle_cost
            cost.observe_chunk(sum(command.chunk_tokens.values()), event.seconds)
            self._apply_prompt_logprobs(command, event)
            for sequence_id, tokens in command.chunk_tokens.items():
                shard.advance(command.residents[sequence_id], tokens)
        else:
            shard.steps_since_prefill += 1
            shard.mixed_cost.observe_decode(event.seconds)
        for sequence_id, token in event.tokens:
            self._apply_token(shard, command, sequence_id, token)
        return False

    def _apply_prompt_logprobs(self, command: InFlight, event: Stepped) -> None:
        """Deliver what was not delivered before: a prompt that lost its cells halfway is computed from its start."""
        for sequence_id, tokens in event.prompt_logprobs:
            resident = command.residents[sequence_id]
            if resident.live:
                sequence = resident.sequence
                new = tokens[max(0, sequence.prompt_logprobs_delivered - resident.computed) :]
                sequence.prompt_logprobs_delivered += len(new)
                self._state.outbox.deliver_prompt_logprobs(sequence.request_id, new)

    def _apply_token(self, shard: ShardState, command: InFlight, sequence_id: int, token: GeneratedToken) -> None:
        resident = command.residents[sequence_id]
        if not resident.live:
            return  # cancelled while the shard was computing
        sequence = resident.sequence
        request = sequence.request
        if sequence_id not in command.chunk_tokens:
            shard.grow(resident)
        sequence.output.append(token.token_id)
        sequence.losses = 0
        self._state.fair_share.charge(request.spec.tenant, _OUTPUT_TOKEN)
        self._state.outbox.deliver_token(request.request_id, token)
        if token.finish is not None:
            self._state.lengths.observe(len(sequence.output))
            shard.finish(resident)
            del self._state.residents[request.request_id]
            self._state.forget(request.request_id)

    def _fail_pass(self, shard: ShardState, command: InFlight, outcome: StepOutcome) -> bool:
        """The pass changed nothing: prompts that were to begin wait again. Whether it took cells from others."""
        for sequence_id in command.chunk_tokens:
            resident = command.residents[sequence_id]
            if not resident.begun:
                was_live = resident.live
                shard.never_began(resident)
                if was_live:
                    self._state.wait_again(resident.sequence)
        command.chunk_tokens.clear()
        command.steps_left = 0
        return outcome is StepOutcome.NO_KV and self._make_room(shard, command)

    def _make_room(self, shard: ShardState, command: InFlight) -> bool:
        """The shard says its cache is full though the accounting says it is not: whoever is new there gives way."""
        if shard.parked:
            for sequence_id in list(shard.parked):
                shard.evict(sequence_id)
            return True
        live = [resident for key, resident in command.residents.items() if shard.residents.get(key) is resident]
        if not live:
            return False
        victim = max(live, key=lambda resident: resident.sequence.request_id)
        shard.remove(victim)
        shard.release_now = True
        self._take_back(victim.sequence)
        return True

    def _apply_swap_out(self, event: SwappedOut) -> None:
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
            self._state.wait_again(sequence)
            how = Preemption.SWAP if saved else Preemption.RECOMPUTE
            self._state.outbox.add(Preempt(sequence.request_id, how))
        shard.swap_cost.observe(cells, event.seconds)

    def _apply_swap_in(self, event: SwappedIn) -> None:
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
                self._take_back(resident.sequence)
        shard.swap_cost.observe(cells, event.seconds)

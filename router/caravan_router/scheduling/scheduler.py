"""The scheduler: a function of its state, the events and the time, to a list of actions.

Every command is planned from the whole picture at the moment a shard can take one; nothing is committed earlier.
Plan, execute (the shell), apply (the next events).
"""

from collections.abc import Iterable
from typing import assert_never

from caravan_router.scheduling.actions import Action, Emit, Fail, FailureReason, Start
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
    Tick,
)
from caravan_router.scheduling.placement import choose
from caravan_router.scheduling.policy import SchedulerConfig
from caravan_router.scheduling.queue import WaitingQueue
from caravan_router.scheduling.sequence import Request, Resident, Sequence
from caravan_router.scheduling.shard_state import InFlight, ShardState
from caravan_router.scheduling.tokens import GeneratedToken


class Scheduler:
    """One queue, any number of shards, every step decided here. ``now`` is in seconds and never goes back."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.waiting = WaitingQueue(config.max_bypass)
        self.shards: dict[str, ShardState] = {}
        # Every request that has not ended: waiting, or resident somewhere.
        self.sequences: dict[int, Sequence] = {}
        self._residents: dict[int, tuple[ShardState, Resident]] = {}
        self._last_command_id = 0
        self._no_shard_since: float | None = None

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Apply what happened, then plan what shards do next."""
        actions: list[Action] = []
        emitted: list[tuple[int, GeneratedToken]] = []
        preempted = False
        for event in events:
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
                case CommandEnded():
                    self._end_command(event)
                case Tick():
                    pass
                case _:
                    assert_never(event)
        if emitted:
            actions.insert(0, Emit(tuple(emitted)))  # before a failure of the same request
        self._fail_hopeless(now, actions)
        self._plan(actions, may_admit=not preempted)
        return actions

    # Requests

    def _submit(self, request: Request, actions: list[Action]) -> None:
        assert request.request_id not in self.sequences, f"request {request.request_id} was submitted before"
        sequence = Sequence(request)
        self.sequences[request.request_id] = sequence
        self.waiting.push(sequence)
        if self.shards:
            self._fail_unplaceable([sequence], actions)

    def _fail_unplaceable(self, sequences: list[Sequence], actions: list[Action]) -> None:
        """End those of the waiting ``sequences`` that fit no shard even when it is empty."""
        for sequence in sequences:
            if not any(shard.could_ever_hold(sequence) for shard in self.shards.values()):
                self.waiting.remove(sequence)
                self._fail(sequence, FailureReason.DOES_NOT_FIT, actions)

    def _cancel(self, request_id: int) -> None:
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            return  # it ended while the cancellation was on its way
        if request_id in self._residents:
            shard, resident = self._residents.pop(request_id)
            shard.evict(resident)
            shard.release_now = True
        else:
            self.waiting.remove(sequence)

    def _fail(self, sequence: Sequence, reason: FailureReason, actions: list[Action]) -> None:
        del self.sequences[sequence.request.request_id]
        actions.append(Fail(sequence.request.request_id, reason))

    def _fail_hopeless(self, now: float, actions: list[Action]) -> None:
        """End waiting requests that no shard came back for in time."""
        if self.shards:
            self._no_shard_since = None
            return
        if self._no_shard_since is None:
            self._no_shard_since = now
        if now - self._no_shard_since >= self._config.no_shard_grace_s:
            for sequence in list(self.waiting):
                self.waiting.remove(sequence)
                self._fail(sequence, FailureReason.NO_SHARD, actions)

    # Shards

    def _join(self, event: ShardJoined, actions: list[Action]) -> None:
        self._lose(event.shard, actions)  # a shard that joins is empty, whatever was thought of it
        self.shards[event.shard] = ShardState(event.shard, event.limits, self._config.max_batch_size)
        self._fail_unplaceable(list(self.waiting), actions)

    def _lose(self, name: str, actions: list[Action]) -> None:
        shard = self.shards.pop(name, None)
        if shard is None:
            return
        for resident in shard.residents.values():
            resident.live = False
            self._take_back(resident.sequence, actions)

    def _take_back(self, sequence: Sequence, actions: list[Action]) -> None:
        """Queue a sequence again after it lost its cells: prompt and output so far are computed anew."""
        del self._residents[sequence.request.request_id]
        sequence.losses += 1
        if sequence.losses > self._config.max_losses:
            self._fail(sequence, FailureReason.NO_PROGRESS, actions)
        else:
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
            shard.fail_pass(command)
            return event.outcome is StepOutcome.NO_KV and self._make_room(shard, command, actions)
        if command.chunk_tokens:
            has_riders = len(command.chunk_tokens) < len(command.residents)
            cost = shard.mixed_cost if has_riders else shard.idle_cost
            cost.observe_chunk(sum(command.chunk_tokens.values()), event.seconds)
            for sequence_id, tokens in command.chunk_tokens.items():
                command.residents[sequence_id].computed += tokens
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
            resident.computed += 1  # the token before this one is in the cache now
        sequence.output.append(row.token.token_id)
        sequence.losses = 0
        request_id = sequence.request.request_id
        emitted.append((request_id, row.token))
        if row.token.finish is not None:
            shard.evict(resident)
            del self._residents[request_id]
            del self.sequences[request_id]

    def _make_room(self, shard: ShardState, command: InFlight, actions: list[Action]) -> bool:
        """The shard says its cache is full though the accounting says it is not: take back the newest of the pass."""
        live = [resident for resident in command.residents.values() if resident.live]
        if not live:
            return False
        victim = max(live, key=lambda resident: resident.sequence.request.request_id)
        shard.evict(victim)
        shard.release_now = True
        self._take_back(victim.sequence, actions)
        return True

    # Planning

    def _needs_plan(self, shard: ShardState) -> bool:
        """Cheap, since it is asked for every shard after every pass of any."""
        return shard.can_command and (
            not shard.in_flight or shard.release_now or (len(self.waiting) > 0 and shard.free_sequences > 0)
        )

    def _plan(self, actions: list[Action], *, may_admit: bool) -> None:
        waiting = len(self.waiting)
        drafts = [Draft(shard, self._config, waiting) for shard in self.shards.values() if self._needs_plan(shard)]
        while may_admit and drafts:
            placed = self.waiting.pop_fitting(lambda sequence: choose(drafts, self.shards.values(), sequence))
            if placed is None:
                break
            sequence, draft = placed
            resident = draft.admit(sequence)
            request_id = sequence.request.request_id
            self._residents[request_id] = (draft.shard, resident)
            if not sequence.started:
                sequence.started = True
                actions.append(Start(request_id))
        for draft in drafts:
            command = draft.finish(self._last_command_id + 1)
            if command is not None:
                self._last_command_id += 1
                actions.append(command)

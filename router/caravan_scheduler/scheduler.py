"""The scheduler: a function of its state, the events and the time, to a list of actions.

Every command is planned from the whole picture at the moment a shard can take one; nothing is committed earlier.
Plan, execute (the shell), apply (the next events).
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import assert_never

from caravan_proto.messages.commands import Save
from caravan_proto.messages.results import LayoutSet, Loaded, Saved, StepOutcome
from caravan_scheduler.actions import (
    Action,
    FailureReason,
    Flushed,
    Left,
    PinAnswered,
    Preempt,
    Preemption,
)
from caravan_scheduler.beams import BeamGroup
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import Standing
from caravan_scheduler.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_scheduler.events import (
    ActionFailed,
    Cancelled,
    CommandEnded,
    Encoded,
    Event,
    Fetched,
    FlushRequested,
    GraceChanged,
    PinRequested,
    Replaced,
    RunsFound,
    SavedRun,
    ShardDraining,
    ShardJoined,
    ShardLost,
    Stepped,
    Submitted,
    Taken,
    ThoughtEndRequested,
    Tick,
    ToolsCalled,
    Unpinned,
)
from caravan_scheduler.failures import Failures
from caravan_scheduler.fault import on_behalf
from caravan_scheduler.jobs.expected_return import ExpectedReturn
from caravan_scheduler.jobs.policy import NewPolicy
from caravan_scheduler.known_prompts import KnownPrompts
from caravan_scheduler.pins import Pins
from caravan_scheduler.planning.planner import Planner
from caravan_scheduler.planning.preemption import victim_of_full_cache
from caravan_scheduler.planning.waiting_reason import Why
from caravan_scheduler.planning.wanted_shards import WantedShards
from caravan_scheduler.results import EncodingResults, apply_transfer, note_load
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.command import InFlight
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.state import SchedulerState
from caravan_scheduler.waiting.fair_share import OUTPUT_TOKEN
from caravan_scheduler.waiting.queue import WaitingQueue


class Scheduler:
    """One queue, any number of shards, every step decided here. ``now`` is in seconds and never goes back."""

    def __init__(
        self, config: SchedulerConfig, former: "Scheduler | None" = None, new_policy: NewPolicy = ExpectedReturn
    ) -> None:
        """``former``: that of the model that had the name before, with other weights."""
        known = None if former is None else KnownPrompts(former.state.known_prompts)
        self._state: SchedulerState = SchedulerState(config, known_prompts=known, new_policy=new_policy)
        self._planner = Planner(self._state)
        self._failures = Failures(self._state)
        self._encoding_results = EncodingResults(self._state, self._failures)
        # How many shards the load needs.
        self.wanted = WantedShards()

    @property
    def waiting(self) -> WaitingQueue:
        """Requests that no shard has taken."""
        return self._state.waiting

    @property
    def shards(self) -> Mapping[str, ShardAccount]:
        """The leased shards, by name."""
        return self._state.shards

    @property
    def sequences(self) -> Mapping[int, Sequence]:
        """Every request that has not ended, by id: waiting, or resident on a shard."""
        return self._state.sequences

    @property
    def state(self) -> SchedulerState:
        """All that it knows, for `recovery`."""
        return self._state

    @property
    def pins(self) -> Pins:
        """The prefixes that operators pinned."""
        return self._state.pins

    def standing_of(self, request_id: int) -> Standing:
        """Return where a request is that has not ended."""
        sequence = self._state.sequences.get(request_id)
        feedback = None if sequence is None else sequence.feedback
        return Standing(self._state.state_of(request_id), self._state.computed_of(request_id), feedback)

    @property
    def runs_under_way(self) -> list[SavedRun]:
        """The saved runs that shards fetch from others."""
        return self._state.transfers.runs_under_way

    def reasons_to_wait(self, now: float) -> Iterator[tuple[Sequence, Why]]:
        """Yield the requests of the queue in its order, then those that wait for one shard, each with its reason.

        The queue must not change meanwhile.
        """
        waiting = self._state.waiting
        for sequence in itertools.chain(waiting.in_order(now), waiting.deferred):
            yield sequence, self._planner.reason_to_wait(sequence)

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Apply what happened, then plan what shards do next. Raises whatever a bug raises: see `recovery`."""
        preempted = False
        self._state.clock.now_s = now
        for event in events:
            preempted |= self._apply(event)
        self._failures.fail_late(now)
        self._failures.fail_without_shards(now)
        self._planner.plan(now, preempted=preempted)
        return self._state.outbox.drain()

    def begin_anew(self, failed: Collection[int]) -> tuple[int, ...]:
        """Forget all but the requests, as if all shards were lost. Those that ``failed`` end. Return who ends by that.

        If none has, nobody knows which one to blame: each has lost its cells once more, and ends if that is too often.
        """
        grace_s = self._failures.grace_s
        self._state = self._state.after_fault(failed)
        self._planner = Planner(self._state, self._planner.last_command_id)
        self._failures = Failures(self._state)
        self._failures.set_grace(grace_s)
        self._encoding_results = EncodingResults(self._state, self._failures)
        for sequence in [] if failed else list(self._state.waiting):
            sequence.losses += 1
            if sequence.losses > self._state.config.max_losses:
                self._failures.fail(sequence, FailureReason.FAULT)
        return self._state.outbox.faulted

    def _apply(self, event: Event) -> bool:
        """Apply ``event``. Return whether it took cells from a request."""
        match event:
            case Stepped():
                return self._apply_step(event)
            case Submitted():
                if (entered := self._state.enter(event.request)) is not None:
                    self._encoding_results.end_deadly([entered])
                    self._failures.fail_misfits([entered])
            case Cancelled():
                # Unknown if it ended while the cancellation was on its way.
                if (sequence := self._state.sequences.get(event.request_id)) is not None:
                    self._state.abort(sequence)
            case ThoughtEndRequested():
                sequence = self._state.sequences.get(event.request_id)
                return sequence is not None and self._state.end_thought(sequence)
            case ToolsCalled():
                self._state.jobs.call_tools(event.request_id)
            case Replaced():
                self._state.outbox.add(Left(self._state.leave()))
            case Taken():
                self._failures.fail_misfits([self._state.take(sequence) for sequence in event.sequences])
            case ShardJoined():
                self._lose(event.shard)  # a shard that joins is empty, whatever was known of it
                self._state.known_logprobs.clear()  # its file may be a newer one of the same name
                state = self._state
                joined = ShardLedger(event.shard, event.limits, state.config, state.clock, state.pins, state.policy)
                joined.saves.note_runs(event.runs)
                self._state.shards[event.shard] = joined
                if event.survived:
                    # It did not die of what it computed: its last loss counts against no request.
                    state.encodings.forgive(event.shard)
                    for sequence in state.sequences.values():
                        if sequence.fatal_on == event.shard:
                            sequence.fatal_losses, sequence.fatal_on = 0, ""
                self._note_fleet_change(event.shard)
            case RunsFound():
                if (shard := self._state.shards.get(event.shard)) is not None:
                    shard.capacity.note_run_fingerprint(event.run_fingerprint)
                    shard.saves.note_runs([run for run in event.runs if run.key not in shard.runs])
                    self._note_fleet_change(event.shard)
            case ShardLost():
                self._lose(event.shard)
                self._note_fleet_change(event.shard)
            case ShardDraining():
                if (shard := self._state.shards.get(event.shard)) is not None:
                    shard.drain.begin(self._state.clock.now_s)
                    self._note_fleet_change(event.shard)
            case Saved() | Loaded() | LayoutSet() | CommandEnded():
                if (found := self._find_command(event)) is not None:
                    self._apply_reply(*found, event)
            case Fetched():
                apply_transfer(self._state, event)
            case Encoded():
                self._encoding_results.apply(event)
            case PinRequested():
                self._state.outbox.add(PinAnswered(event.pin_id, self._state.pin(event.pin)))
            case Unpinned():
                self._state.pins.remove(event.key)
            case FlushRequested():
                if event.key is not None:
                    self._state.pins.remove(event.key)
                flushed = [shard for name, shard in self._state.shards.items() if name in event.shards]
                evicted = tuple(shard.flush(event.key) for shard in flushed)
                for shard in flushed:
                    self._state.transfers.note_flush(shard.name, event.key)
                    self._state.note_change(shard.name, may_start=True)
                self._state.outbox.add(Flushed(event.flush_id, evicted))
            case GraceChanged():
                self._failures.set_grace(event.seconds)
            case ActionFailed():
                raise RuntimeError("an action was not carried out")
            case Tick():
                may_start = self._state.policy.take_refusals()
                for name in self._state.shards:  # for what is done after some time
                    self._state.note_change(name, may_start=may_start)
            case _:
                assert_never(event)
        return False

    def _note_fleet_change(self, shard: str) -> None:
        """Let the next plan ask again for all waiting requests. End those that no shard could hold."""
        self._state.note_change(shard, may_start=True)
        self._state.waiting.mark_due()
        self._failures.fail_misfits(list(self._state.waiting))

    # Failures

    def _move_misfits(self, shard: ShardLedger) -> None:
        """Queue the sequences of ``shard`` again that it could hold only in a layout that it failed to take."""
        for resident in list(shard.stays.residents.values()):
            if resident.is_live and not shard.capacity.could_ever_hold(resident.sequence):
                shard.cancel(resident)
                self._state.wait_again(resident.sequence)
                self._state.outbox.add(Preempt(resident.request_id, Preemption.RECOMPUTE))

    def _lose(self, name: str) -> None:
        """Forget a shard. Its requests wait to be computed again on another."""
        shard = self._state.shards.pop(name, None)
        if shard is None:
            return
        self._state.forget_saved(name)
        self._state.known_prompts.note_lost(name)
        self._state.transfers.lose(name)
        self._encoding_results.lose(shard)
        fatal = shard.commands.positions_under_way
        repeated = {
            key: positions for key, positions in fatal.items() if shard.stays.residents[key].sequence.lost_a_shard
        }
        # If one of them lost a shard just before, the others of the step are not to blame.
        fatal = repeated or fatal
        for resident in (*shard.stays.residents.values(), *shard.stays.leaving.values()):
            if resident.is_live:
                self._lose_cells(resident.sequence, fatal.get(resident.sequence_id, range(0)), name)

    def _lose_cells(self, sequence: Sequence, fatal: range = range(0), shard: str = "") -> None:
        """Queue a sequence that lost its cells by a failure, unless it has lost them too often.

        ``fatal``: the positions that were computed when ``shard`` was lost.
        """
        self._state.wait_again(sequence)
        if sequence.group is not None:
            sequence = sequence.group.leader
        sequence.losses += 1
        if fatal:
            again = max(fatal.start, sequence.fatal.start) < min(fatal.stop, sequence.fatal.stop)
            sequence.fatal_losses = sequence.fatal_losses + 1 if again else 1
            sequence.fatal, sequence.fatal_on = fatal, shard
        config = self._state.config
        if sequence.losses > config.max_losses or sequence.fatal_losses >= config.max_fatal_losses:
            self._failures.fail(sequence, FailureReason.NO_PROGRESS)

    # Results

    def _find_command(
        self, event: Stepped | Saved | Loaded | LayoutSet | CommandEnded
    ) -> tuple[ShardLedger, InFlight] | None:
        """Return the command to which ``event`` belongs; None if it was sent before the shard was lost."""
        shard = self._state.shards.get(event.shard)
        command = None if shard is None else shard.commands.find(event.command_id)
        return None if shard is None or command is None else (shard, command)

    def _apply_step(self, event: Stepped) -> bool:
        """Apply a step. Return whether it took cells from a request."""
        found = self._find_command(event)
        if found is None:
            return False
        shard, command = found
        if event.outcome is not StepOutcome.OK:
            self._state.note_change(shard.name, may_start=True)
            for resident in shard.fail_step(command):
                self._state.wait_again(resident.sequence)
            if event.outcome is StepOutcome.MEDIA_MISSING:
                self._encoding_results.note_missing(shard, command, event.missing_media)
            return event.outcome is StepOutcome.NO_KV and self._make_room(shard, command)
        for sequence_id, logprobs in event.prompt_logprobs:
            if sequence_id not in event.without_logits:
                self._deliver_prompt_logprobs(command.residents[sequence_id], logprobs)
        drafted = self._note_drafts(command, event) if event.drafts else 0
        note_load(self._state.load, shard, command, event)
        may_start = shard.apply_step(command, event.seconds, tokens=len(event.tokens), drafted=drafted)
        self._state.note_change(shard.name, may_start=may_start)
        for sequence_id in event.without_logits:
            resident = command.residents[sequence_id]
            if resident.is_live:
                self._failures.fail(resident.sequence, FailureReason.NO_LOGITS)
        taken = shard.take_tokens(command, event.tokens)
        for sequence_id, feedback in event.feedback:
            resident = command.residents[sequence_id]
            # Else its token is not taken either.
            if resident.status.is_live:
                resident.sequence.feedback = feedback
        self._apply_tokens(taken)
        for sequence_id, likeliest in event.evaluations:
            self._apply_evaluation(command.residents[sequence_id], shard, likeliest)
        return False

    @on_behalf(1)
    def _deliver_prompt_logprobs(self, resident: Resident, tokens: tuple[PromptToken, ...]) -> None:
        """Deliver what was not delivered before: a prompt that lost its cells halfway is computed from its start."""
        if resident.is_live:
            sequence = resident.sequence
            sequence.add_prompt_logprobs(resident.computed, tokens)
            new = tuple(sequence.prompt_logprobs[sequence.prompt_logprobs_delivered :])
            self._state.outbox.deliver_prompt_logprobs(sequence.request_id, new)
            sequence.prompt_logprobs_delivered += len(new)
            self._state.known_logprobs.note(sequence)

    def _note_drafts(self, command: InFlight, event: Stepped) -> int:
        """Tell requests about their drafts. Return the number of draft tokens."""
        for sequence_id, count in event.drafts:
            resident = command.residents[sequence_id]
            if resident.is_live:
                self._state.outbox.note_drafts(resident.request_id, count)
        return sum(count.drafted for _, count in event.drafts)

    def _apply_tokens(self, taken: list[tuple[Sequence, GeneratedToken]]) -> None:
        """Hand out the tokens of a step. It makes no call for each of them, since that would cost as much again."""
        # First of all: what was not delivered is computed again after a bug, and what was delivered is not.
        self._state.outbox.deliver_tokens([(sequence.request_id, token) for sequence, token in taken])
        ended = []
        for sequence, token in taken:
            sequence.output.append(token.token_id)
            sequence.losses = 0
            if token.finish is not None:
                ended.append(sequence)
        self._state.shares.charge_each([sequence for sequence, _ in taken], OUTPUT_TOKEN)
        for sequence in ended:
            self._state.finish(sequence)

    @on_behalf(1)
    def _apply_evaluation(self, resident: Resident, shard: ShardLedger, likeliest: tuple[Alternative, ...]) -> None:
        """Note the next tokens of a beam, and advance its search if those of all beams are known."""
        group = resident.sequence.group
        if not resident.is_live or group is None:
            return
        if not likeliest or not math.isfinite(likeliest[0].logprob):
            self._failures.fail(group.leader, FailureReason.NO_LOGITS)
        elif group.note_next(resident.sequence, likeliest):
            self._advance(shard, group)

    def _advance(self, shard: ShardLedger, group: BeamGroup[Sequence]) -> None:
        leader = group.leader
        leader.losses = 0
        self._state.shares.charge_each([leader], OUTPUT_TOKEN * group.width)
        replaced = group.advance()
        if replaced is None:
            self._failures.deliver_beams(group)
            self._state.finish(leader)
            return
        for member in replaced:
            self._state.end_branch(member)
        for resident in shard.stays.beam_groups[group].values():
            shard.extend(resident)

    def _make_room(self, shard: ShardLedger, command: InFlight) -> bool:
        """Give up cells of a shard that says its cache is full though its ledger says it is not."""
        if shard.stays.parked:
            shard.evict_all()
            return True
        victim = victim_of_full_cache(shard, command)
        if victim is None:
            return False
        shard.take_back(victim)
        self._lose_cells(victim.sequence)
        return True

    def _apply_reply(
        self, shard: ShardLedger, command: InFlight, event: Saved | Loaded | LayoutSet | CommandEnded
    ) -> None:
        self._state.note_change(shard.name, may_start=True)
        match event:
            case Saved():
                for entry in command.command.entries if isinstance(command.command, Save) else ():
                    saved = command.residents[entry.sequence_id].sequence
                    if not entry.is_state:
                        self._state.known_prompts.note_saved(saved, entry.cuts[-1][1])
                for resident, is_saved in shard.apply_save(command, event):
                    self._state.wait_again(resident.sequence, saved_on=shard.name if is_saved else "")
                    how = Preemption.SWAP if is_saved else Preemption.RECOMPUTE
                    self._state.outbox.add(Preempt(resident.request_id, how))
            case Loaded():
                for resident in shard.apply_load(command, event):
                    self._lose_cells(resident.sequence)
            case LayoutSet():
                for resident in shard.apply_layout(event):
                    self._lose_cells(resident.sequence)
                self._move_misfits(shard)
                self._failures.fail_misfits(list(self._state.sequences.values()))
            case CommandEnded():
                shard.commands.end(command)
            case _:
                assert_never(event)

"""The scheduler: a function of its state, the events and the time, to a list of actions.

Every command is planned from the whole picture at the moment a shard can take one; nothing is committed earlier.
Plan, execute (the shell), apply (the next events).
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import assert_never

from caravan_proto.messages.results import LayoutSet, Loaded, Saved, StepOutcome
from caravan_router.core.generation import GenerationState
from caravan_router.core.tokens import Alternative, GeneratedToken
from caravan_router.scheduling.actions import Action, FailureReason, Flushed, Left, PinAnswered, Preempt, Preemption
from caravan_router.scheduling.beams import BeamGroup
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.encoding_results import EncodingResults
from caravan_router.scheduling.events import (
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
    ShardDraining,
    ShardJoined,
    ShardLost,
    Stepped,
    Submitted,
    Taken,
    Tick,
    Unpinned,
)
from caravan_router.scheduling.failures import Failures
from caravan_router.scheduling.pins import Pins
from caravan_router.scheduling.planning.planner import Planner
from caravan_router.scheduling.planning.preemption import victim_of_full_cache
from caravan_router.scheduling.planning.waiting_reason import Why
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import ShardAccount
from caravan_router.scheduling.shard.command import InFlight
from caravan_router.scheduling.shard.ledger import ShardLedger
from caravan_router.scheduling.state import SchedulerState
from caravan_router.scheduling.waiting.fair_share import OUTPUT_TOKEN
from caravan_router.scheduling.waiting.queue import WaitingQueue


class Scheduler:
    """One queue, any number of shards, every step decided here. ``now`` is in seconds and never goes back."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._state = SchedulerState(config)
        self._planner = Planner(self._state)
        self._failures = Failures(self._state)
        self._encoding_results = EncodingResults(self._state, self._failures)

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
    def pins(self) -> Pins:
        """The prefixes that operators pinned."""
        return self._state.pins

    def state_of(self, request_id: int) -> GenerationState:
        """Return where a request is that has not ended."""
        return self._state.state_of(request_id)

    def reasons_to_wait(self, now: float) -> Iterator[tuple[Sequence, Why]]:
        """Yield the requests of the queue in its order, then those that wait for one shard, each with its reason.

        The queue must not change meanwhile.
        """
        waiting = self._state.waiting
        for sequence in itertools.chain(waiting.in_order(now), waiting.deferred):
            yield sequence, self._planner.reason_to_wait(sequence)

    def forget_forks(self) -> None:
        """Forget where prompts have begun alike, which is known by the keys of their prefixes alone."""
        for shard in self._state.shards.values():
            shard.checkpoints.forget_seen()

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Apply what happened, then plan what shards do next."""
        preempted = False
        self._state.clock.now_s = now
        for event in events:
            preempted |= self._apply(event)
        self._failures.fail_late(now)
        self._failures.fail_without_shards(now)
        self._planner.plan(now, preempted=preempted)
        return self._state.outbox.drain()

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
            case Replaced():
                self._state.outbox.add(Left(self._state.leave()))
            case Taken():
                self._failures.fail_misfits([self._state.take(sequence) for sequence in event.sequences])
            case ShardJoined():
                self._lose(event.shard)  # a shard that joins is empty, whatever was known of it
                self._state.known_logprobs.clear()  # its file may be a newer one of the same name
                state = self._state
                joined = ShardLedger(event.shard, event.limits, state.config, state.clock, state.pins)
                joined.saves.note_runs(event.runs)
                self._state.shards[event.shard] = joined
                if event.survived:
                    self._forgive_loss(event.shard)
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
                self._apply_transfer(event)
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
            case Tick():
                for name in self._state.shards:  # for what is done after some time
                    self._state.note_change(name, may_start=False)
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

    def _forgive_loss(self, shard: str) -> None:
        """Count the last loss of ``shard`` against no request: it did not die of what it computed."""
        self._state.encodings.forgive(shard)
        for sequence in self._state.sequences.values():
            if sequence.fatal_on == shard:
                sequence.fatal_losses, sequence.fatal_on = 0, ""

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
        self._deliver_prompt_logprobs(command, event)
        drafted = self._note_drafts(command, event) if event.drafts else 0
        may_start = shard.apply_step(command, event.seconds, tokens=len(event.tokens), drafted=drafted)
        self._state.note_change(shard.name, may_start=may_start)
        for sequence_id, feedback in event.feedback:
            resident = command.residents[sequence_id]
            # Else its token is not taken either.
            if resident.status.is_live:
                resident.sequence.feedback = feedback
        self._apply_tokens(shard.take_tokens(command, event.tokens))
        if event.evaluations:
            self._apply_evaluations(shard, command, event.evaluations)
        return False

    def _deliver_prompt_logprobs(self, command: InFlight, event: Stepped) -> None:
        """Deliver what was not delivered before: a prompt that lost its cells halfway is computed from its start."""
        for sequence_id, tokens in event.prompt_logprobs:
            resident = command.residents[sequence_id]
            if resident.is_live:
                sequence = resident.sequence
                sequence.add_prompt_logprobs(resident.computed, tokens)
                new = tuple(sequence.prompt_logprobs[sequence.prompt_logprobs_delivered :])
                sequence.prompt_logprobs_delivered += len(new)
                self._state.known_logprobs.note(sequence)
                self._state.outbox.deliver_prompt_logprobs(sequence.request_id, new)

    def _note_drafts(self, command: InFlight, event: Stepped) -> int:
        """Tell requests about their drafts. Return the number of draft tokens."""
        for sequence_id, count in event.drafts:
            resident = command.residents[sequence_id]
            if resident.is_live:
                self._state.outbox.note_drafts(resident.request_id, count)
        return sum(count.drafted for _, count in event.drafts)

    def _apply_tokens(self, taken: list[tuple[Sequence, GeneratedToken]]) -> None:
        """Hand out the tokens of a step. It makes no call for each of them, since that would cost as much again."""
        ended = []
        for sequence, token in taken:
            sequence.output.append(token.token_id)
            sequence.losses = 0
            if token.finish is not None:
                ended.append(sequence)
        self._state.outbox.deliver_tokens([(sequence.request_id, token) for sequence, token in taken])
        self._state.fair_share.charge_each([sequence.spec.tenant for sequence, _ in taken], OUTPUT_TOKEN)
        for sequence in ended:
            self._state.finish(sequence)

    def _apply_evaluations(
        self, shard: ShardLedger, command: InFlight, evaluations: tuple[tuple[int, tuple[Alternative, ...]], ...]
    ) -> None:
        """Note the next tokens of beams, and advance the searches of which those of all beams are known."""
        for sequence_id, likeliest in evaluations:
            resident = command.residents[sequence_id]
            group = resident.sequence.group
            if resident.is_live and group is not None and group.note_next(resident.sequence, likeliest):
                self._advance(shard, group)

    def _advance(self, shard: ShardLedger, group: BeamGroup[Sequence]) -> None:
        leader = group.leader
        leader.losses = 0
        self._state.fair_share.charge(leader.spec.tenant, OUTPUT_TOKEN * group.width)
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

    def _apply_transfer(self, event: Fetched) -> None:
        """Note which runs have come to a shard, and let the request that waits for them start."""
        unwanted = self._state.transfers.unwanted_keys(event.transfer_id)
        transfer = self._state.transfers.end(event.transfer_id, event.seconds if all(event.fetched) else 0.0)
        if transfer is None:
            return  # one of the shards was lost
        target = self._state.shards[transfer.target]
        came = [run for run, fetched in zip(transfer.runs, event.fetched, strict=True) if fetched]
        target.saves.note_runs(came)
        for key in unwanted:
            target.saves.drop(key)
        waiting = self._state.sequences.get(transfer.request_id) if transfer.request_id is not None else None
        if waiting is not None and len(came) < len(transfer.runs):
            self._state.fetch_no_more(waiting)
        self._state.waiting.mark_due()
        self._state.note_change(transfer.source, may_start=False)
        self._state.note_change(transfer.target, may_start=True)

    def _apply_reply(
        self, shard: ShardLedger, command: InFlight, event: Saved | Loaded | LayoutSet | CommandEnded
    ) -> None:
        self._state.note_change(shard.name, may_start=True)
        match event:
            case Saved():
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

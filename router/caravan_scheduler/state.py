"""What the scheduler knows of requests: which wait, which are on a shard, and what they are charged."""

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from caravan_scheduler.actions import Fail, FailureReason, Resume, Start
from caravan_scheduler.beams import BeamGroup
from caravan_scheduler.config import Clock
from caravan_scheduler.core.generation import GenerationState
from caravan_scheduler.core.prefixes import PinRefusal
from caravan_scheduler.encodings import Encodings
from caravan_scheduler.fault import on_behalf
from caravan_scheduler.jobs.expected_return import ExpectedReturn
from caravan_scheduler.jobs.jobs import Jobs
from caravan_scheduler.jobs.policy import NewPolicy, PolicyInput
from caravan_scheduler.known_logprobs import KnownLogprobs
from caravan_scheduler.known_prompts import KnownPrompts
from caravan_scheduler.load import Load
from caravan_scheduler.outbox import Outbox
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.pins import Pin, Pins
from caravan_scheduler.recomputed import Fleet, recomputed_by
from caravan_scheduler.sequence import Request, Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.resident import Resident, Status
from caravan_scheduler.shard.saved_runs import bytes_with
from caravan_scheduler.transfers import MOST_FETCHES, Transfers
from caravan_scheduler.waiting.fair_share import PROMPT_TOKEN, Shares
from caravan_scheduler.waiting.queue import Deadlines, WaitingQueue

if TYPE_CHECKING:
    from caravan_scheduler.config import SchedulerConfig
    from caravan_scheduler.shard.policy import JobPolicy


class SchedulerState:
    """Every request that has not ended is in ``sequences``, and either in ``waiting`` or resident on a shard.

    Members of a beam search that have no beam are neither, while the leader waits or another member is on a shard.
    """

    def __init__(
        self,
        config: "SchedulerConfig",
        before: "SchedulerState | None" = None,
        known_prompts: KnownPrompts | None = None,
        new_policy: NewPolicy = ExpectedReturn,
    ) -> None:
        """``before``: a state that this one replaces, without its requests and shards."""
        self.config = config
        self.clock: Clock = Clock() if before is None else before.clock
        self.shares = Shares()
        self.jobs = Jobs(self.clock)
        self.new_policy = new_policy
        self.policy: JobPolicy = new_policy(PolicyInput(self.clock, self.shares))
        self.lengths = OutputLengths()
        self.load = Load()
        self.deadlines = Deadlines()
        self.waiting = WaitingQueue(config.max_bypass, config.aging_s, self.shares.tenants, self.policy.charged)
        self.outbox = Outbox()
        self.transfers: Transfers = Transfers(0 if before is None else before.transfers.last_id)
        self.encodings: Encodings = Encodings(0 if before is None else before.encodings.last_id)
        self.pins: Pins = Pins() if before is None else before.pins
        self.known_logprobs = KnownLogprobs()
        self.known_prompts = known_prompts or KnownPrompts()
        self.shards: dict[str, ShardLedger] = {}
        self.sequences: dict[int, Sequence] = {}
        # By request id.
        self._stays: dict[int, tuple[ShardLedger, Resident]] = {}
        # Number of stays of each priority.
        self._priorities: Counter[int] = Counter()
        # Shards that changed since the last plan, by name, and whether waiting requests may start there by that.
        self._changes: dict[str, bool] = {}

    def after_fault(self, failed: Collection[int]) -> "SchedulerState":
        """Return a state with the requests of this one, which a bug may have broken, and no shard.

        It has what callers and operators gave, and none of what was found out. Requests that ``failed``, and the beam
        searches to which they belong, end; those that have got their end are forgotten. The others keep their tokens.
        """
        new = SchedulerState(self.config, self, new_policy=self.new_policy)
        new.outbox.take_told(self.outbox)
        ended = new.outbox.ended
        for request_id in sorted({*self.sequences, *failed} - ended):
            sequence = self.sequences.get(request_id)
            group = None if sequence is None else sequence.group
            members = [request_id] if group is None else [member.request_id for member in group.members]
            if sequence is None or any(member in failed or member in ended for member in members):
                new.outbox.add(Fail(request_id, FailureReason.FAULT))
                continue
            sequence.reached = self.reached_by(sequence)
            if group is not None and group.leader is sequence:
                group.restart()
            new.take(sequence)
        return new

    def requests_with(self, request_id: int) -> tuple[int, ...]:
        """Return a request, with the other known ones of its beam search: they end together."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.group is None:
            return (request_id,)
        return tuple(member.request_id for member in sequence.group.members)

    def expel(self, request_ids: Collection[int]) -> None:
        """End requests whose turn raised an exception, and let the next plan look at everything again.

        Those that had ended by then keep their end.
        """
        for request_id in sorted({*request_ids} - self.outbox.ended):
            if (sequence := self.sequences.get(request_id)) is not None:
                self.abort(sequence)
            self.outbox.add(Fail(request_id, FailureReason.FAULT))
        for name in self.shards:
            self.note_change(name, may_start=True)
        self.waiting.mark_due()

    def reached_by(self, sequence: Sequence) -> int:
        """Return how many first tokens of a request were computed, so far or in an earlier stay."""
        stay = self._stays.get(sequence.request_id)
        return sequence.reached if stay is None else max(sequence.reached, stay[1].computed)

    def note_change(self, shard: str, *, may_start: bool) -> None:
        """Note that the next plan must look at ``shard``. ``may_start``: maybe a waiting request can start there."""
        self._changes[shard] = may_start or self._changes.get(shard, False)

    @property
    def changes(self) -> Collection[str]:
        """The names of the shards that were noted since the last plan."""
        return self._changes

    def take_changes(self) -> dict[str, bool]:
        """Return what was noted since the last call: the shards that changed, and whether requests may start there."""
        changes, self._changes = self._changes, {}
        return changes

    def pin(self, pin: Pin) -> PinRefusal | None:
        """Pin a prefix if every shard that saves anything has room for all pinned ones. Return why not, else None."""
        if self.pins.get(pin.key) is None and self.shards:
            able = [one.runs for one in self.shards.values() if one.saves.are_possible and self.config.prefix_caching]
            limit = min((runs.pin_limit for runs in able), default=0)
            needed = max((bytes_with(runs, pin) for runs in able), default=0)
            if needed > limit or not limit:
                return PinRefusal(limit_bytes=limit, needed_bytes=needed)
        self.pins.add(pin)
        for shard in self.shards.values():
            shard.note_pin()
            self.note_change(shard.name, may_start=False)
        return None

    @property
    def lowest_priority(self) -> int | None:
        """The lowest priority of the stays; None without any."""
        return min(self._priorities, default=None)

    @on_behalf(1)
    def enter(self, request: Request) -> Sequence | None:
        """Let a new request wait. Return the sequence that waits; None if more members of its beam search must come."""
        sequence = Sequence(request)
        self._know(sequence)
        if not sequence.is_bulk:
            self.load.arrivals.note(self.clock.now_s)
        beams = request.spec.beams
        if beams is not None:
            # The members are submitted one after another.
            group = self.sequences[request.request_id - beams.index].group
            if group is None:
                group = BeamGroup(sequence)
            else:
                group.join(sequence)
            sequence.group = group
            if not group.is_whole:
                return None
            sequence = group.leader
        self.waiting.push(sequence)
        return sequence

    def leave(self) -> tuple[Sequence, ...]:
        """Forget all requests, none of which may be on a shard, and return them by arrival."""
        assert not self._stays, f"requests {list(self._stays)} are on shards"
        left = tuple(sorted(self.sequences.values(), key=lambda sequence: sequence.request_id))
        for sequence in list(self.waiting):
            self.waiting.remove(sequence)
        for sequence in left:
            self._forget(sequence)
        return left

    @on_behalf(1)
    def take(self, sequence: Sequence) -> Sequence:
        """Let a request wait that has left another scheduler, with its beam search. Return the sequence that waits."""
        self._know(sequence)
        sequence.saved_on = ""
        sequence.fetches = 0
        sequence.common.clear()
        sequence.matches.clear()
        group = sequence.group
        if group is None:
            self.waiting.push(sequence)
            return sequence
        # More members of the search may have to come.
        if group.leader is sequence and group.is_whole:
            self.waiting.push(sequence)
        return group.leader

    def _know(self, sequence: Sequence) -> None:
        request = sequence.request
        assert request.request_id not in self.sequences, f"request {request.request_id} was submitted before"
        sequence.account = self.shares.enter(request.spec.tenant.name, request.spec.session)
        self.jobs.enter(sequence, (one for shard in self.shards.values() for one in shard.stays.parked.values()))
        self.sequences[request.request_id] = sequence
        if request.spec.beams is None or request.spec.beams.index == 0:
            self.deadlines.add(request)

    def state_of(self, request_id: int) -> GenerationState:
        """Return where a request is that has not ended. One that has not entered yet is queued."""
        sequence = self.sequences.get(request_id)
        if sequence is not None and sequence.group is not None:
            leader = sequence.group.leader
            if not any(member.request_id in self._stays for member in sequence.group.members):
                return self._state_of_waiting(leader)
            return GenerationState.RUNNING if leader.output else GenerationState.PREFILLING
        if request_id in self._stays:
            _, resident = self._stays[request_id]
            if resident.status is Status.LEAVING:
                return GenerationState.SWAPPED
            return GenerationState.PREFILLING if resident.prefilling else GenerationState.RUNNING
        return GenerationState.QUEUED if sequence is None else self._state_of_waiting(sequence)

    def computed_of(self, request_id: int) -> int:
        """Return how many first tokens of a request are computed on its shard; 0 while it is on none."""
        return self._stays[request_id][1].computed if request_id in self._stays else 0

    def _state_of_waiting(self, sequence: Sequence) -> GenerationState:
        if sequence.saved_on:
            return GenerationState.SWAPPED
        return (
            GenerationState.ENCODING if self.encodings.are_awaited_by(sequence.request_id) else GenerationState.QUEUED
        )

    @on_behalf(1)
    def stay(self, sequence: Sequence, shard: ShardLedger, resident: Resident) -> None:
        """Note that ``sequence``, which has left the queue, stays on ``shard``. Charge it for the prompt."""
        self._leave_saved(sequence)
        sequence.common.clear()
        sequence.matches.clear()
        uncharged = max(0, resident.target - max(resident.computed, sequence.charged))
        sequence.charged = resident.target
        self.jobs.start(sequence, uncharged)
        self.shares.charge_each([sequence], PROMPT_TOKEN * uncharged)
        if sequence.started:
            computed_again = max(0, sequence.reached - resident.computed)
            self.outbox.add(Resume(sequence.request_id, shard.name, computed_again))
        self.branch(sequence, shard, resident)
        sequence.fetches = 0

    @on_behalf(1)
    def branch(self, sequence: Sequence, shard: ShardLedger, resident: Resident) -> None:
        """Note that ``sequence``, which may have another beam than before, begins on ``shard``."""
        self._stays[sequence.request_id] = (shard, resident)
        self._priorities[resident.priority] += 1
        if not sequence.started:
            sequence.started = True
            recomputed = recomputed_by(Fleet(self.known_prompts, self.shards, self.sequences), shard, resident)
            self.known_prompts.start(sequence, shard.name)
            self.load.note_start(resident.target - resident.cached, resident.target - resident.shared)
            prompt_tokens = len(sequence.spec.prompt)
            # One that goes on after its router ended may find a part of its output, too.
            cached = min(resident.cached, prompt_tokens)
            self.outbox.add(Start(sequence.request_id, shard.name, prompt_tokens, cached, recomputed))

    @on_behalf(1)
    def end_branch(self, sequence: Sequence) -> None:
        """Give up the cells of a beam that has ended, if it has a place."""
        if sequence.request_id in self._stays:
            shard, resident = self._end_stay(sequence)
            if resident.is_live:
                shard.take_back(resident)

    def note_fetch(self, sequence: Sequence) -> None:
        """Note that ``sequence`` waits for one more transfer."""
        sequence.fetches += 1

    def fetch_no_more(self, sequence: Sequence) -> None:
        """Let ``sequence`` wait for no other transfer in its next stay."""
        sequence.fetches = MOST_FETCHES

    @on_behalf(1)
    def wait_again(self, sequence: Sequence, *, saved_on: str = "") -> None:
        """Queue a request again whose stay has ended before it did. ``saved_on``: the shard that saved its cells.

        A beam search loses the cells of all its members. Ignored if it waits already.
        """
        if (group := sequence.group) is not None:
            if sequence.request_id not in self._stays:
                return
            for member in group.members:
                self.end_branch(member)
            group.restart()
            self.waiting.push(group.leader)
            return
        self._end_stay(sequence)
        sequence.saved_on = saved_on
        self.waiting.push(sequence)

    @on_behalf(1)
    def end_thought(self, sequence: Sequence) -> bool:
        """Let what follows the tokens of a request be the end of its thought. Return whether it lost its place by that.

        A shard gets the parameters of a sequence at the start of its stay, so another stay begins, with the same cells.
        """
        if sequence.group is not None or not sequence.limit_thought() or sequence.request_id not in self._stays:
            return False
        shard, resident = self._stays[sequence.request_id]
        shard.cancel(resident)
        self.wait_again(sequence)
        return True

    @on_behalf(1)
    def finish(self, sequence: Sequence) -> None:
        """Forget a request that has all its tokens, or the whole beam search that it leads, and end its stay.

        Only what the leader of a search holds is kept for others.
        """
        shard, resident = self._end_stay(sequence)
        shard.finish(resident)
        self._note_end(sequence, shard, resident)
        self.lengths.observe(len(sequence.output))
        self.jobs.answer(sequence)
        for member in (sequence,) if sequence.group is None else sequence.group.members:
            self.end_branch(member)
            self._forget(member)

    @on_behalf(1)
    def abort(self, sequence: Sequence, *, keeps: bool = True) -> None:
        """Forget a request that nobody waits for, wherever it is. A beam search ends as a whole.

        ``keeps``: others may begin with what is computed of it.
        """
        if sequence.group is not None:
            self._abort_beams(sequence.group)
            return
        if sequence.request_id in self._stays:
            shard, resident = self._end_stay(sequence)
            shard.cancel(resident, keeps=keeps)
            self._note_end(sequence, shard, resident)
            if sequence.output:  # a stop string ends an answer so, too
                self.jobs.answer(sequence)
        else:
            self.waiting.remove(sequence)
            self.waiting.mark_due()  # others may have been behind it
            self._leave_saved(sequence)
        self._forget(sequence)

    def _abort_beams(self, group: BeamGroup[Sequence]) -> None:
        if group.is_whole and not any(member.request_id in self._stays for member in group.members):
            self.waiting.remove(group.leader)
            self.waiting.mark_due()
        for member in group.members:
            self.end_branch(member)
            self._forget(member)

    def _leave_saved(self, sequence: Sequence) -> None:
        """Note that ``sequence`` no longer needs the shard that saved its cells, which may have waited for that."""
        if sequence.saved_on in self.shards:
            self.note_change(sequence.saved_on, may_start=False)
        sequence.saved_on = ""

    def forget_saved(self, shard: str) -> None:
        """Note that nothing is saved any more on ``shard``, which was lost."""
        for sequence in self.waiting:
            if sequence.saved_on == shard:
                sequence.saved_on = ""

    def _end_stay(self, sequence: Sequence) -> tuple[ShardLedger, Resident]:
        shard, resident = self._stays.pop(sequence.request_id)
        sequence.reached = max(sequence.reached, resident.computed)
        self.note_change(shard.name, may_start=True)
        self._priorities[resident.priority] -= 1
        if not self._priorities[resident.priority]:
            del self._priorities[resident.priority]
        return shard, resident

    def _note_end(self, sequence: Sequence, shard: ShardLedger, resident: Resident) -> None:
        """Remember what became of the cells of ``sequence``, whose stay has just ended with it."""
        is_kept = resident.status in (Status.PARKED, Status.DROPPED)
        # The output of a beam is not what its cells had before.
        computed = resident.computed if sequence.group is None else min(resident.computed, len(sequence.spec.prompt))
        self.known_prompts.end(sequence, computed, (shard.name, resident.sequence_id), is_kept=is_kept)

    def _forget(self, sequence: Sequence) -> None:
        self.known_prompts.forget_live(sequence)
        self.jobs.leave(sequence)
        del self.sequences[sequence.request_id]
        self.encodings.forget(sequence.request_id)
        self.shares.leave(sequence.spec.tenant.name, sequence.spec.session)

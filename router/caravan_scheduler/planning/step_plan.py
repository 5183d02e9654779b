"""The next command of one shard while it is being planned.

Drafts use cells that are free anyway: nothing is evicted or preempted for them. No sequence gets more tokens by a
Decode than it may have steps, so all that the Decode can take is promised while it runs (`InFlight.coming_cells`), and
leaves room for the steps after it.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from caravan_proto.messages.commands import (
    Chunk,
    Command,
    Decode,
    Evaluate,
    FilterBatch,
    Load,
    LoadEntry,
    Prefill,
    PrefixCopy,
    Row,
    RowOutputs,
    SequenceParameters,
)
from caravan_scheduler.beams import BeamGroup
from caravan_scheduler.config import JoinReason, PrefillMode, SchedulerConfig
from caravan_scheduler.fault import on_behalf
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.bulk import kept_from, yielding
from caravan_scheduler.planning.chunking import (
    Riders,
    StepBudget,
    join_reason,
    step_after,
    step_seconds,
    to_border,
)
from caravan_scheduler.planning.forecast import GROWTH_CELLS, CellForecast
from caravan_scheduler.planning.layout import steps_left
from caravan_scheduler.planning.sharing import left_of, much_shorter, passes
from caravan_scheduler.prefix_tree import NO_MATCH, Match
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.command import UNSEEN_STEPS
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.policy import Held
from caravan_scheduler.shard.prefix_reuse import has_cells_for_load, has_id_beside, has_id_for, worth_copying
from caravan_scheduler.shard.resident import Resident, Status
from caravan_scheduler.shard.saved_runs import SavedPrefix
from caravan_scheduler.waiting.queue import effective_priority

_POOL_BYTES = 16
# A long prompt keeps this part of the steps that it shares with others, as a divisor, and beside requests that go on
# from cells.
_SHARE, _SHARE_BESIDE_RETURNS = 2, 4
# While a return is expected, a step takes this part of the target at most, so that it hardly waits.
_STEP_BEFORE_RETURN = 0.75
# Parked sequences are evicted for this many steps of a Decode, not for all that it may run ahead.
_CLEARED_STEPS = 16
# The most steps of a Decode, however short they are.
_MOST_STEPS = 4096


def draft_plan(shard: ShardAccount, residents: Collection[Resident], steps: int) -> tuple[int, int]:
    """Return the most steps of a Decode, at most ``steps``, and the most draft tokens of each of them.

    There are none if too few cells are free.
    """
    limits = shard.capacity.limits
    most = min(limits.draft_tokens, limits.max_batch_tokens - len(residents))
    if most <= 0:
        return steps, 0
    drafts = min(most, sum([resident.sequence.spec.max_draft_tokens for resident in residents]))
    if drafts <= 0 or shard.capacity.is_bounded_by_sequence:
        return steps, max(0, drafts)
    with_drafts = min(steps, shard.cells.free // len(residents) - GROWTH_CELLS)
    return (with_drafts, drafts) if with_drafts > UNSEEN_STEPS else (steps, 0)


def parameters_of(sequence: Sequence) -> SequenceParameters:
    """Return the parameters for the next stay of ``sequence``."""
    spec = sequence.spec
    drafts = spec.max_draft_tokens > 0
    return SequenceParameters(
        sampling=spec.sampling,
        prompt_length=len(spec.prompt),
        max_length=spec.max_length,
        ignore_eos=spec.stopping.ignore_eos,
        stop_token_ids=spec.stopping.stop_token_ids,
        min_tokens=spec.stopping.min_tokens,
        adapter=spec.adapter,
        prompt_logprobs=sequence.needs_prompt_logprobs,
        constraint=spec.constraint,
        thought=spec.thought,
        max_draft_tokens=spec.max_draft_tokens,
        prediction=spec.prediction if drafts else (),
        draft_pool=hashlib.blake2b(spec.namespace.encode(), digest_size=_POOL_BYTES).digest() if drafts else b"",
        traceparent=spec.traceparent,
        feedback=sequence.feedback,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """What a step's plan depends on beside its shard.

    ``waiting``: how many requests wait. ``urgent``: how many of them are no bulk work. ``adapter``: that of the first,
    None if no request may start. ``bulk_step_s``: how long a step of bulk work alone carries prompts.
    ``is_fleet_idle``: whether no shard has residents.
    """

    config: SchedulerConfig
    lengths: OutputLengths
    now: float
    waiting: int
    urgent: int
    bulk_step_s: float
    is_fleet_idle: bool
    adapter: str | None


class StepPlan:
    """Collects what the next step of ``shard`` carries, within its token budget; `send` makes the command of it.

    Prompts that have started come first; the rest of the budget admits waiting requests. Saved prefixes are loaded by a
    command of their own, ahead of the step. All sequences of a step have one ``adapter``.
    """

    def __init__(self, shard: ShardLedger, given: PlanInput) -> None:
        self.shard = shard
        self._given = given
        bulk = yielding(shard, given.now, given.config.aging_s)
        is_bulk_step = not given.urgent and len(bulk) == len(shard.stays.residents)
        paused = () if is_bulk_step else bulk
        waiting = given.waiting if is_bulk_step else given.urgent
        wanted = (
            {one.adapter for one in shard.stays.residents.values() if one not in paused}
            if paused
            else shard.stays.adapters
        )
        self._has_rivals = len(wanted) > 1
        if given.adapter is not None:
            wanted.add(given.adapter)
        self.adapter = shard.commands.turn.next(wanted)
        self._forecast: CellForecast | None = None
        self._chunks: list[tuple[Resident, int]] = []
        self._loaded: list[tuple[Resident, Match, SavedPrefix]] = []
        has_rivals = wanted != {self.adapter}
        # Beam searches whose rows may be in the step, the one that starts with it, and the beams that branch off.
        self._groups = [group for group in shard.stays.beam_groups if group.leader.spec.adapter == self.adapter]
        self._new_group: BeamGroup[Sequence] | None = None
        self.branched: list[Resident] = []
        self._decoding = shard.stays.decoding
        prefilling = shard.stays.prefilling
        if paused:
            self._decoding = [resident for resident in self._decoding if resident not in paused]
            prefilling = [resident for resident in prefilling if resident not in paused]
        if has_rivals:
            self._decoding = [resident for resident in self._decoding if resident.adapter == self.adapter]
            prefilling = [resident for resident in prefilling if resident.adapter == self.adapter]
        self._riders = self._decoding
        self._joins_others = False
        self._join_reason = join_reason(
            given.config,
            waiting=waiting,
            running=len(self._riders),
            steps_since_prefill=shard.commands.steps_since_prefill,
        )
        if given.config.mode is PrefillMode.PAUSE and (prefilling or self._join_reason):
            self._riders = []  # decodes wait
        prompts = len(prefilling) + max(0, min(waiting, shard.stays.free_sequences))
        count = len(self._riders)
        claim = shard.claims.any_of(self._riders, prompts, shard.stays.overtaken_by)
        riders = Riders(count=count, seconds=shard.costs.decode_s(count), claim=claim)
        seconds = step_seconds(given.config, prompts=prompts, riders=riders)
        # A step without decodes reads the weights, too. Until it is known how long that takes, none is cut short: short
        # ones alone would tell little of what prompts cost, and others would avoid the shard.
        if is_bulk_step and (least_s := shard.costs.decode_s(max(1, count))):
            seconds = min(seconds, least_s + given.bulk_step_s)
        elif shard.expects_return:
            seconds = min(seconds, _STEP_BEFORE_RETURN * given.config.target_itl_s)
        waited_s = 0.0 if shard.commands.in_flight else given.now - shard.commands.stepped_s
        step = step_after(given.config, seconds, riders=riders, waited_s=waited_s)
        self._budget = StepBudget(shard, given.config, step)
        shorter = much_shorter(shard, given.config, prefilling)
        for resident in shorter:
            self._add_chunk(resident, leaving=self._budget.whole // _SHARE)
        for resident in prefilling:
            if resident not in shorter:
                self._add_chunk(resident)

    @on_behalf(1)
    def _add_chunk(self, resident: Resident, *, leaving: int = 0) -> None:
        if tokens := self._budget.take(resident, leaving=leaving):
            self._chunks.append((resident, tokens))
            if self._budget.is_alone:
                self._riders = []

    # Admission

    @property
    def is_idle(self) -> bool:
        """Whether it carries nothing though the shard has residents: they have other adapters."""
        has_work = self._chunks or self._decoding or self._loaded or self._groups
        return not has_work and bool(self.shard.stays.residents)

    @property
    def _is_turn_of_beams(self) -> bool:
        """Whether the step is one of beam searches, whoever waits."""
        return self._new_group is not None or (bool(self._groups) and not self.shard.commands.evaluated_last)

    @property
    def is_open(self) -> bool:
        """Whether any request could start in this step with a chunk of its prompt."""
        return self._budget.has_tokens and self._is_open_for_short

    @property
    def _is_open_for_short(self) -> bool:
        """Whether a request could start in this step if a prompt gave it a part of its chunk."""
        if self._join_reason is None or self._loaded or self._is_turn_of_beams:
            return False
        return has_id_for(self.shard, NO_MATCH)

    def _loan(self, sequence: Sequence, cached: int) -> tuple[int, int]:
        """Return the place of the chunk of which ``sequence``, whose first ``cached`` tokens are there, gets a part.

        And how many tokens that may have; 0 for none. A prompt that takes most of the step shares it with much shorter
        ones that would wait long for it or are of another key; and with what others passed often enough, or what goes
        on from cells, which keeps these from others while it waits.
        """
        if not self._chunks or self._budget.is_alone:
            return 0, 0
        place = max(range(len(self._chunks)), key=lambda one: left_of(self._chunks[one][0]))
        resident, tokens = self._chunks[place]
        if (priority := self._priority(sequence)) < resident.sequence.spec.priority:
            return place, 0
        is_first = priority > resident.priority or sequence.bypassed >= self._given.config.max_bypass
        if not (is_first or passes(self.shard, self._given.config, sequence, sequence.known_tokens - cached, resident)):
            return place, 0
        share = _SHARE if sequence.kept is None else _SHARE_BESIDE_RETURNS
        return place, self._budget.lendable(resident, tokens, share=share)

    @property
    def is_full(self) -> bool:
        """Whether no request can start in this step, nor be loaded before it."""
        if self.is_open:
            return False
        if self._is_turn_of_beams or not has_id_for(self.shard, NO_MATCH):
            return True
        lendable = (self._budget.lendable(*chunk, share=_SHARE_BESIDE_RETURNS) for chunk in self._chunks)
        return self._has_newcomers and not any(lendable)

    def can_admit(self, sequence: Sequence, match: Match) -> bool:
        """Whether ``sequence`` could start in this very step from the prefix that ``match`` found."""
        if sequence.spec.adapter != self.adapter:
            return False
        if not self._is_open_for_short:
            return False
        # A beam search gets a step of its own.
        if sequence.group is None and not self._budget.has_tokens and not self._loan(sequence, match.length)[1]:
            return False
        if sequence.needs_prompt_logprobs and not self._budget.has_prompt_logprobs:
            return False
        if sequence.group is not None and self._has_newcomers:
            return False
        if not self._budget.can_begin(sequence, worth_copying(self.shard, match).length):
            return False
        return self._has_room(sequence, match)

    def can_load(self, sequence: Sequence, match: Match) -> bool:
        """Whether what is saved of ``sequence`` could be loaded now behind the cells that ``match`` found.

        No newcomer of this step has to wait for that.
        """
        if self._has_newcomers or self._is_turn_of_beams or not has_id_for(self.shard, match):
            return False
        return has_cells_for_load(self.shard, sequence, match) and self._has_room(sequence, match)

    @property
    def _has_newcomers(self) -> bool:
        return any(resident.status is Status.STARTING for resident, _ in self._chunks)

    def _has_room(self, sequence: Sequence, match: Match) -> bool:
        if sequence.group is not None and self.shard.stays.free_sequences < sequence.group.width:
            return False
        if not self.shard.capacity.could_hold_now(sequence):
            return False
        if self._forecast is None:
            self._forecast = CellForecast(self.shard, self._given.lengths, self._given.config.watermark)
        given = self._given
        kept = kept_from(self.shard, sequence, given.now, given.config.aging_s, urgent=given.urgent > 0)
        if given.is_fleet_idle and not self.shard.stays.residents:
            # No other event would let it be asked for again.
            kept = 0
        if kept is None:
            return False
        held = self.shard.held_against(sequence)
        if not held.ids and not held.cells:
            return self._forecast.has_room(sequence, match.live_length, kept)
        if not has_id_beside(self.shard, held.ids):
            return False
        if self.shard.capacity.is_bounded_by_sequence:
            return True
        held_anyway = _held_anyway(self.shard, sequence, match, held)
        return self._forecast.has_room(sequence, held_anyway, max(held.cells, kept))

    def admit(self, sequence: Sequence, match: Match) -> Resident:
        """Start ``sequence``, for which `can_admit` is true, with a chunk of its prompt."""
        self._joins_others = self._joins_others or bool(self.shard.stays.decoding)
        self._forecast = None
        needed = sequence.known_tokens - match.length
        if sequence.group is None and self._budget.lacks(needed):
            place, most = self._loan(sequence, match.length)
            if most:
                resident, tokens = self._chunks[place]
                self._chunks[place] = resident, tokens - self._budget.lend(resident, tokens, needed, most=most)
            assert self._budget.has_tokens, "there is no room for its chunk"
        resident = self.shard.place(sequence, match, self._priority(sequence))
        if sequence.group is not None:
            self._new_group = sequence.group
        else:
            self._add_chunk(resident)
        return resident

    def _priority(self, sequence: Sequence) -> int:
        return effective_priority(sequence.request, self._given.now, self._given.config.aging_s)

    def load(self, sequence: Sequence, match: Match, prefix: SavedPrefix) -> Resident:
        """Start ``sequence``, for which `can_load` is true, from what was saved."""
        self._forecast = None
        resident = self.shard.load(sequence, match, prefix, self._priority(sequence))
        self._loaded.append((resident, match, prefix))
        return resident

    # The command

    @property
    def join_reason(self) -> JoinReason | None:
        """Why requests start beside others that run; None if none do."""
        return self._join_reason if self._joins_others else None

    def send(self, command_id: int) -> Command | None:
        """Return the command, which the ledger counts as sent; None if the shard should continue as it is."""
        shard = self.shard
        if self._loaded:
            return self._load(command_id)
        if self._is_turn_of_beams or (self._groups and not (self._chunks or self._decoding)):
            return self._evaluate(command_id)
        if self._chunks:
            return self._prefill(command_id)
        if shard.commands.in_flight and not shard.header.is_urgent:
            return None  # a Decode is running and nothing is to change
        if self._decoding:
            return self._decode(command_id)
        if shard.header.is_needed:
            return self._filter(command_id)
        return None

    def _load(self, command_id: int) -> Load:
        shard = self.shard
        entries = tuple(
            LoadEntry(
                sequence_id=resident.sequence_id,
                token_ids=tokens,
                media=media,
                slices=prefix.behind(match.length),
                adapter=resident.adapter,
                copy=PrefixCopy(match.sources[0], match.length) if match.sources else None,
            )
            for resident, match, prefix in self._loaded
            for tokens, media in (resident.sequence.sent(match.length, prefix.length),)
        )
        command = Load(shard=shard.name, command_id=command_id, header=shard.header.message, entries=entries)
        shard.send(command, [resident for resident, _, _ in self._loaded])
        return command

    def _prefill(self, command_id: int) -> Prefill:
        shard = self.shard
        shard.make_free(len(self._riders))
        command = Prefill(
            shard=shard.name,
            command_id=command_id,
            header=shard.header.message,
            chunks=tuple(_chunk(resident, tokens) for resident, tokens in self._chunks),
            ride=tuple(resident.sequence_id for resident in self._riders),
        )
        shard.send(command, [*(resident for resident, _ in self._chunks), *self._riders])
        return command

    def _decode(self, command_id: int) -> Decode:
        shard, residents = self.shard, self._decoding
        steps = self._run_ahead_steps
        if self._has_rivals:
            steps = min(steps, shard.commands.turn.steps_left(self.adapter))
        shard.make_free(len(residents) * min(steps, _CLEARED_STEPS))
        steps = min(steps, steps_left(shard, residents))
        if shard.layout.shares_cells:
            steps = max(1, min(steps, shard.cells.free // len(residents)))
        if shard.stays.beam_groups or self._budget.is_late:
            steps = 1  # then it is the turn of the beams, or of prompts
        steps, drafts = draft_plan(shard, residents, steps)
        command = Decode(
            shard=shard.name,
            command_id=command_id,
            header=shard.header.message,
            sequence_ids=tuple(resident.sequence_id for resident in residents),
            max_steps=steps,
            max_draft_tokens=drafts,
        )
        shard.send(command, residents)
        return command

    @property
    def _run_ahead_steps(self) -> int:
        """How many steps a Decode may have. Between two of them the shard is idle while messages travel."""
        config = self._given.config
        step_s = self.shard.costs.decode_s(len(self._decoding))
        within = min(_MOST_STEPS, int(config.run_ahead_s / step_s)) if step_s else 0
        return max(config.run_ahead_steps, within)

    def _evaluate(self, command_id: int) -> Evaluate:
        """Let beams branch off from those that are computed, and compute what is missing of all."""
        shard = self.shard
        groups = self._groups if self._new_group is None else [self._new_group]
        if self._new_group is None:
            for group in groups:
                self._branch_off(group)
        shard.make_free(0)
        pending = [
            resident
            for group in groups
            for resident in shard.stays.beam_groups[group].values()
            if resident.computed < resident.target
        ]
        left = max(min(len(pending), shard.capacity.limits.max_batch_tokens), self._budget.whole)
        rows: list[tuple[Resident, int]] = []
        used = 0
        # New beams come first, since this command must start them. Each of the others gets at least a token.
        for resident in sorted(pending, key=lambda one: (one.is_running, one.target - one.computed)):
            others = len(pending) - len(rows) - 1
            tokens = min(resident.target - resident.computed, left - others)
            tokens = to_border(resident, tokens, shard.capacity.limits.max_batch_tokens - used - others)
            if tokens > 0:
                rows.append((resident, tokens))
                left -= tokens
                used += tokens
        command = Evaluate(
            shard=shard.name,
            command_id=command_id,
            header=shard.header.message,
            rows=tuple(_row(resident, tokens) for resident, tokens in rows),
        )
        shard.send(command, [resident for resident, _ in rows])
        return command

    def _branch_off(self, group: BeamGroup[Sequence]) -> None:
        for index, (parent, length) in list(group.branches.items()):
            source = self.shard.stays.beam_groups[group].get(parent)
            if source is not None and source.is_running and source.computed >= length:
                self.branched.append(self._branch(group.members[index], source, length))
                group.note_placed(group.members[index])

    @on_behalf(1)
    def _branch(self, beam: Sequence, source: Resident, length: int) -> Resident:
        """Start ``beam`` from the first ``length`` tokens of ``source``."""
        can_copy = length > 0 and (length == source.computed or not self.shard.layout.whole_only)
        match = Match(length, length, (source.sequence_id,)) if can_copy else NO_MATCH
        return self.shard.place(beam, match, source.priority)

    def _filter(self, command_id: int) -> FilterBatch:
        shard = self.shard
        command = FilterBatch(
            shard=shard.name, command_id=command_id, header=shard.header.message, keep=tuple(sorted(shard.stays.parked))
        )
        shard.send(command, [])
        return command


def _held_anyway(shard: ShardAccount, sequence: Sequence, match: Match, held: Held) -> int:
    """Return how many first tokens of ``sequence`` take no cells beside those that others hold."""
    if held.ids.intersection(match.sources):
        return match.length
    source = sequence.kept
    if source is None or source.sequence_id not in match.sources:
        return match.live_length
    return max(match.live_length, source.computed - shard.cells.tree.own_cells((source.sequence_id,)))


@on_behalf(0)
def _row(resident: Resident, tokens: int) -> Row:
    sequence, start = resident.sequence, resident.computed
    end = start + tokens
    is_first = not resident.is_running
    assert sequence.group is not None
    top_n_tokens = sequence.group.top_n_tokens if end == resident.target else 0
    sent, media = sequence.sent(start, end)
    return Row(
        sequence_id=resident.sequence_id,
        start=start,
        token_ids=sent,
        media=media,
        adapter=resident.adapter,
        outputs=RowOutputs.LAST if top_n_tokens else RowOutputs.NONE,
        top_n_tokens=top_n_tokens,
        copy=_copy(resident) if is_first else None,
    )


def _copy(resident: Resident) -> PrefixCopy | None:
    return None if resident.source_id is None else PrefixCopy(resident.source_id, resident.cached)


@on_behalf(0)
def _chunk(resident: Resident, tokens: int) -> Chunk:
    sequence, start = resident.sequence, resident.computed
    end = start + tokens
    is_first = not resident.is_running
    sent, media = sequence.sent(start, end)
    return Chunk(
        sequence_id=resident.sequence_id,
        start=start,
        token_ids=sent,
        media=media,
        last=end == resident.target,
        setup=parameters_of(sequence) if is_first else None,
        copy=_copy(resident) if is_first else None,
    )

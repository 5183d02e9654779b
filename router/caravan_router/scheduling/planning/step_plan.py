"""The next command of one shard while it is being planned."""

from dataclasses import dataclass

from caravan_router.scheduling.actions import (
    Chunk,
    Command,
    Decode,
    FilterBatch,
    Prefill,
    PrefixCopy,
    SwapIn,
    SwapInEntry,
)
from caravan_router.scheduling.config import PrefillMode, SchedulerConfig
from caravan_router.scheduling.planning.chunking import chunk_budget, join_reason, pass_seconds
from caravan_router.scheduling.planning.forecast import CellForecast
from caravan_router.scheduling.planning.output_length import OutputLengths
from caravan_router.scheduling.sequence import Sequence, SwapTicket
from caravan_router.scheduling.shard.command import InFlight, Kind
from caravan_router.scheduling.shard.ledger import ShardState
from caravan_router.scheduling.shard.prefix_tree import Match
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.waiting.queue import effective_priority

# Parked sequences are evicted for this many passes of a Decode, not for all that it may run ahead.
_CLEARED_STEPS = 16
# Copying a split sequence moves all of its cells: as long as computing one token for each so many of them.
_CELLS_PER_TOKEN = 256
_LEAST_COPY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a draft must know beside its shard: how many requests wait, and the first one's adapter, if any does."""

    waiting: int
    adapter: str | None
    now: float


class Draft:
    """Collects what the next pass of ``shard`` carries, within its token budget; ``finish`` turns it into a command.

    Prompts already begun come first; what is left of the budget admits waiting requests. Swapped sequences that come
    back do so by a command of their own, ahead of the pass. All in it have one ``adapter``.
    """

    def __init__(self, shard: ShardState, config: SchedulerConfig, lengths: OutputLengths, outside: Outside) -> None:
        self.shard = shard
        wanted = shard.adapters
        self._has_rivals = len(wanted) > 1
        if outside.adapter is not None:
            wanted.add(outside.adapter)
        self.adapter = shard.turn.next(wanted)
        self._config = config
        self._lengths = lengths
        self._now = outside.now
        self._forecast: CellForecast | None = None
        self._chunks: list[tuple[Resident, int]] = []
        self._restored: list[tuple[Resident, SwapTicket]] = []
        # Sequences whose cells this command copies: they must not go before it ran.
        self._sources: set[int] = set()
        self._decoding = [resident for resident in shard.decoding if resident.adapter == self.adapter]
        self._riders = self._decoding
        self._joins_others = False
        waiting = outside.waiting
        prefilling = [resident for resident in shard.prefilling if resident.adapter == self.adapter]
        self._join_reason = join_reason(
            config, waiting=waiting, running=len(self._riders), steps_since_prefill=shard.steps_since_prefill
        )
        if config.mode is PrefillMode.PAUSE and (prefilling or self._join_reason):
            self._riders = []  # decodes wait
        self._prompt_logprobs_budget = shard.limits.max_prompt_logprob_tokens
        self._budget = self._token_budget(prompts=len(prefilling) + max(0, min(waiting, shard.free_sequences)))
        for resident in prefilling:
            self._add_chunk(resident)

    def _token_budget(self, prompts: int) -> int:
        shard, riders = self.shard, len(self._riders)
        cost = shard.mixed_cost if riders else shard.idle_cost
        seconds = pass_seconds(self._config, prompts=prompts, riders=riders)
        budget = chunk_budget(self._config, tokens_within_target=cost.tokens_within(seconds), riders=riders)
        return min(budget, shard.limits.max_batch_tokens - riders)

    def _add_chunk(self, resident: Resident) -> None:
        tokens = min(self._budget, resident.target - resident.computed)
        if resident.sequence.needs_prompt_logprobs:
            tokens = min(tokens, self._prompt_logprobs_budget)
            self._prompt_logprobs_budget -= max(0, tokens)
        if tokens > 0:
            self._budget -= tokens
            self._chunks.append((resident, tokens))

    # Admission

    @property
    def is_open(self) -> bool:
        """Whether any request could start in this pass. Sequences that come back go first, without newcomers."""
        return self._join_reason is not None and self._budget > 0 and not self._restored and self._has_id_beside(None)

    def _has_id_beside(self, source: int | None) -> bool:
        """Whether a sequence id can be had without giving up what this command copies, nor ``source``."""
        shard = self.shard
        if shard.free_sequences <= 0:
            return False
        if shard.free_ids or shard.releasing:
            return True
        return any(sequence_id not in self._sources and sequence_id != source for sequence_id in shard.parked)

    @property
    def is_idle(self) -> bool:
        """It carries nothing, though the shard has residents: they have other adapters."""
        return not (self._chunks or self._decoding or self._restored) and bool(self.shard.residents)

    def can_admit(self, sequence: Sequence, match: Match) -> bool:
        """Whether ``sequence`` could start in this very pass with the prefix that ``match`` found."""
        if sequence.spec.adapter != self.adapter or (
            sequence.needs_prompt_logprobs and self._prompt_logprobs_budget == 0
        ):
            return False
        return self.shard.could_ever_hold(sequence) and self._has_cells(sequence, match.live_length)

    def _has_cells(self, sequence: Sequence, known_live: int) -> bool:
        if self._forecast is None:
            self._forecast = CellForecast(self.shard, self._lengths, self._config.watermark)
        return self._forecast.has_room(sequence, known_live)

    def admit(self, sequence: Sequence, match: Match) -> Resident:
        """Place ``sequence`` and start its prompt; ``can_admit`` was asked."""
        shard = self.shard
        self._joins_others = self._joins_others or bool(shard.decoding)
        match = self._worth_sharing(match)
        resident = self._resident(sequence, target=sequence.known_tokens)
        source = match.sources[0] if match.sources else None
        parked = next((key for key in match.sources if key in shard.parked), None)
        if parked is not None and self._should_take_over(parked, match, resident.target):
            source = parked
            resident.takes_over = True
            shard.take_over(source, match.length)
            resident.sequence_id = source
        else:
            keep = self._sources if source is None else self._sources | {source}
            resident.sequence_id = shard.acquire_id(keep)
            if source is None:
                shard.tree.insert(resident.sequence_id, sequence.request.prefix_namespace)
            else:
                self._sources.add(source)
                shard.touch(source)
                shard.tree.fork(resident.sequence_id, source, match.length)
        resident.source_id = source
        resident.shared = resident.computed = resident.indexed = match.length
        shard.residents[resident.sequence_id] = resident
        shard.make_free(0, keep=self._sources)
        self._add_chunk(resident)
        return resident

    def _worth_sharing(self, match: Match) -> Match:
        """Without what would cost more to copy than to compute."""
        limits = self.shard.limits
        if limits.shares_cells or match.length >= max(_LEAST_COPY, limits.cells_per_sequence // _CELLS_PER_TOKEN):
            return match
        return Match()

    def _should_take_over(self, parked: int, match: Match, target: int) -> bool:
        """Whether to begin in place of the parked source, rather than beside it."""
        shard = self.shard
        if parked in self._sources:
            return False
        held = shard.tree.length(parked)
        if match.length == held:
            return True  # nothing is lost
        others = [sequence_id for sequence_id in shard.parked if sequence_id not in self._sources | {parked}]
        if not shard.free_ids and not shard.releasing and (not others or 2 * match.length >= held):
            return True
        evictable = shard.held_cells - shard.live_cells - (held - match.live_length)
        return shard.free_cells + max(0, evictable) < target - match.length

    def _resident(self, sequence: Sequence, target: int) -> Resident:
        self._forecast = None
        sequence.common.clear()
        return Resident(
            sequence,
            sequence_id=-1,
            target=target,
            priority=effective_priority(sequence.request, self._now, self._config.aging_s),
        )

    # Restoring

    def restorable(self, sequence: Sequence) -> Match | None:
        """Where the tokens that were not saved come from, if ``sequence`` can be swapped in now."""
        ticket, shard = sequence.ticket, self.shard
        if ticket is None or self._chunks_began_here:
            return None
        match = Match()
        if ticket.start:
            match = shard.match(sequence)
            if match.length < ticket.start:
                return None
        if not self._has_id_beside(match.sources[0] if match.sources else None):
            return None
        live = min(match.live_length, ticket.start)
        return match if self._has_cells(sequence, live) else None

    @property
    def _chunks_began_here(self) -> bool:
        """A newcomer is in this pass already."""
        return any(not resident.begun for resident, _ in self._chunks)

    def restore(self, sequence: Sequence, match: Match) -> Resident:
        """Bring ``sequence`` back; ``restorable`` was asked."""
        shard, ticket = self.shard, sequence.ticket
        assert ticket is not None
        sequence.ticket = None
        source = match.sources[0] if ticket.start else None
        resident = self._resident(sequence, target=ticket.target)
        resident.sequence_id = shard.acquire_id(self._sources if source is None else self._sources | {source})
        resident.source_id = source
        resident.shared = resident.computed = resident.indexed = ticket.start
        if source is None:
            shard.tree.insert(resident.sequence_id, sequence.request.prefix_namespace)
        else:
            self._sources.add(source)
            shard.touch(source)
            shard.tree.fork(resident.sequence_id, source, ticket.start)
        shard.residents[resident.sequence_id] = resident
        shard.restore(resident, ticket.length)
        shard.make_free(0, keep=self._sources)
        self._restored.append((resident, ticket))
        return resident

    # The command

    def finish(self, command_id: int) -> Command | None:
        """The command, recorded as in flight; None if the shard should go on as it is."""
        shard = self.shard
        if self._restored:
            return self._swap_in(command_id)
        if self._chunks:
            return self._prefill(command_id)
        if shard.in_flight and not shard.release_now:
            return None  # a Decode is running and nothing is to change
        if self._decoding:
            return self._decode(command_id)
        if shard.has_header:
            shard.in_flight.append(InFlight(command_id=command_id, kind=Kind.FILTER, residents={}))
            return FilterBatch(
                shard=shard.name, command_id=command_id, header=shard.take_header(), keep=tuple(sorted(shard.parked))
            )
        return None

    def _swap_in(self, command_id: int) -> SwapIn:
        shard = self.shard
        entries = tuple(
            SwapInEntry(
                handle=ticket.handle,
                sequence_id=resident.sequence_id,
                copy=None if resident.source_id is None else PrefixCopy(resident.source_id, ticket.start),
            )
            for resident, ticket in self._restored
        )
        residents = {resident.sequence_id: resident for resident, _ in self._restored}
        shard.in_flight.append(InFlight(command_id=command_id, kind=Kind.SWAP_IN, residents=residents))
        return SwapIn(shard=shard.name, command_id=command_id, header=shard.take_header(), entries=entries)

    def _prefill(self, command_id: int) -> Prefill:
        shard = self.shard
        shard.make_free(len(self._riders), keep=self._sources)
        chunks = tuple(_chunk(resident, tokens) for resident, tokens in self._chunks)
        carried = [resident for resident, _ in self._chunks] + self._riders
        shard.in_flight.append(
            InFlight(
                command_id=command_id,
                kind=Kind.PREFILL,
                residents={resident.sequence_id: resident for resident in carried},
                chunk_tokens={resident.sequence_id: tokens for resident, tokens in self._chunks},
            )
        )
        shard.steps_since_prefill = 0
        shard.turn.take(self.adapter)
        return Prefill(
            shard=shard.name,
            command_id=command_id,
            header=shard.take_header(),
            chunks=chunks,
            ride=tuple(resident.sequence_id for resident in self._riders),
            joins=self._join_reason if self._joins_others else None,
        )

    def _decode(self, command_id: int) -> Decode:
        shard = self.shard
        residents = self._decoding
        steps = self._config.run_ahead_steps
        shard.turn.take(self.adapter)
        if self._has_rivals:
            steps = min(steps, shard.turn.passes_left)
        shard.make_free(len(residents) * min(steps, _CLEARED_STEPS))
        if shard.limits.shares_cells:
            steps = max(1, min(steps, shard.free_cells // len(residents)))
        shard.in_flight.append(
            InFlight(
                command_id=command_id,
                kind=Kind.DECODE,
                residents={resident.sequence_id: resident for resident in residents},
                steps_left=steps,
            )
        )
        return Decode(
            shard=shard.name,
            command_id=command_id,
            header=shard.take_header(),
            sequence_ids=tuple(resident.sequence_id for resident in residents),
            max_steps=steps,
        )


def _chunk(resident: Resident, tokens: int) -> Chunk:
    sequence, start = resident.sequence, resident.computed
    end = start + tokens
    copy = None
    if not resident.begun and resident.source_id is not None:
        copy = PrefixCopy(resident.source_id, resident.shared)
    return Chunk(
        sequence_id=resident.sequence_id,
        start=start,
        token_ids=sequence.tokens(start, end),
        last=end == resident.target,
        setup=None if resident.begun else sequence.spec,
        copy=copy,
        prompt_logprobs=not resident.begun and sequence.needs_prompt_logprobs,
    )

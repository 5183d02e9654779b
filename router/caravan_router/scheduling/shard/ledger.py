"""The account of one shard: who holds which sequence ids and cells, and which commands are under way.

Nothing else changes it: planner, step plan and scheduler read it and call its operations.
"""

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping

from caravan_router.core.prefixes import CachedPrefix, ShardPrefixes
from caravan_router.scheduling.actions import Command, Decode, Header, Prefill, SwapOut
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import ShardLimits
from caravan_router.scheduling.sequence import Sequence, SwapTicket
from caravan_router.scheduling.shard.adapter_turn import AdapterTurn
from caravan_router.scheduling.shard.command import InFlight
from caravan_router.scheduling.shard.costs import ShardCosts
from caravan_router.scheduling.shard.prefix_tree import NO_MATCH, Match, PrefixTree
from caravan_router.scheduling.shard.resident import TRANSITIONS, Resident, Status

# Copying a split sequence moves all of its cells: as long as computing one token for each so many of them.
_CELLS_PER_TOKEN = 256
_LEAST_COPY = 16


class ShardLedger:
    """Every sequence id is free or belongs to the one `Resident` whose status says what the shard does with it.

    Cells are counted, not named: ``tree`` knows which sequences share a run of them.
    """

    def __init__(self, name: str, limits: ShardLimits, config: SchedulerConfig) -> None:
        self.name = name
        self.limits = limits
        self.capacity = min(limits.cells, config.max_batch_total_tokens or limits.cells)
        self._parks = config.prefix_caching
        self._max_residents = config.max_batch_size or limits.max_sequences
        self._free_ids = list(range(limits.max_sequences))
        self._residents: dict[int, Resident] = {}
        self._leaving: dict[int, Resident] = {}
        # Least recently used first.
        self._parked: dict[int, Resident] = {}
        self._releasing: dict[int, Resident] = {}
        self._table_of = {
            Status.STARTING: self._residents,
            Status.RUNNING: self._residents,
            Status.LEAVING: self._leaving,
            Status.DROPPED: self._leaving,
            Status.PARKED: self._parked,
            Status.RELEASING: self._releasing,
        }
        self._in_flight: list[InFlight] = []
        self._handles = itertools.count(1)
        # Sequences from which the next command copies: they must not be evicted before it is sent.
        self._sources: set[int] = set()
        # For the header of the next command: ids released and already given to others, lengths to park, swap handles.
        self._recycled: list[int] = []
        self._parking: dict[int, int] = {}
        self._drop_handles: list[int] = []
        self.tree = PrefixTree()
        self.turn = AdapterTurn()
        self.costs = ShardCosts()
        self.steps_since_prefill = 0
        self.draining = False
        self._now_s = 0.0
        # The shard should get a command at once: it computes for a client that is gone, or its cache is full.
        self.release_now = False

    # What is there

    @property
    def residents(self) -> Mapping[int, Resident]:
        """Sequences that start or run, by id, in the order in which they were placed."""
        return self._residents

    @property
    def leaving(self) -> Mapping[int, Resident]:
        """Sequences whose SwapOut is under way, by id."""
        return self._leaving

    @property
    def parked(self) -> Mapping[int, Resident]:
        """Ended sequences whose cells are kept, by id, least recently used first."""
        return self._parked

    @property
    def releasing(self) -> Mapping[int, Resident]:
        """Sequences that the next command releases, by id."""
        return self._releasing

    @property
    def free_ids(self) -> Collection[int]:
        """Sequence ids that nobody holds."""
        return self._free_ids

    @property
    def prefilling(self) -> list[Resident]:
        """Residents whose prompt is not complete, by descending priority, then in the order of `residents`."""
        found = [resident for resident in self._residents.values() if resident.prefilling]
        return sorted(found, key=lambda resident: -resident.priority)

    @property
    def decoding(self) -> list[Resident]:
        """Residents that take one token per step."""
        return [resident for resident in self._residents.values() if not resident.prefilling]

    @property
    def adapters(self) -> set[str]:
        """The adapters of its residents."""
        return {resident.adapter for resident in self._residents.values()}

    @property
    def free_sequences(self) -> int:
        """How many sequences could start with the next command if all parked ones were evicted."""
        ids = len(self._free_ids) + len(self._releasing) + len(self._parked)
        return 0 if self.draining else min(ids, self._max_residents - len(self._residents))

    def has_id_for(self, match: Match) -> bool:
        """Whether a sequence that starts from ``match`` can get an id without evicting what the next command copies."""
        if self.free_sequences <= 0:
            return False
        if self._free_ids or self._releasing:
            return True
        kept = self._sources | set(match.sources[:1])
        return any(sequence_id not in kept for sequence_id in self._parked)

    def could_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the empty shard has room for ``sequence``."""
        peak = sequence.request.peak_cells
        return peak <= self.limits.cells_per_sequence and peak <= self.capacity

    def match(self, sequence: Sequence) -> Match:
        """Find the longest prefix of ``sequence`` that can be copied. Its last token is always computed."""
        if sequence.needs_prompt_logprobs:
            return NO_MATCH
        tokens = sequence.tokens(0, sequence.known_tokens)
        find = self.tree.match_whole if self.limits.whole_only else self.tree.match
        found = find(sequence.request.prefix_namespace, tokens, len(tokens) - 1)
        sources = tuple(sequence_id for sequence_id in found.sources if self._can_be_copied(sequence_id))
        return Match(found.length, found.live_length, sources) if sources else NO_MATCH

    def _can_be_copied(self, sequence_id: int) -> bool:
        resident = self._residents.get(sequence_id)
        return sequence_id in self._parked or (resident is not None and resident.is_running)

    # Cells

    @property
    def is_bounded_by_sequence(self) -> bool:
        """Whether each sequence has cells of its own, so that there is nothing to share out."""
        return not self.limits.shares_cells and self.capacity == self.limits.cells

    @property
    def live_cells(self) -> int:
        """Cells of sequences that are not parked."""
        residents = (*self._residents.values(), *self._leaving.values())
        if not self.limits.shares_cells:
            return sum(resident.computed for resident in residents)
        # The tree learns of outputs only when they are complete.
        tails = sum(resident.computed - self.tree.length(resident.sequence_id) for resident in residents)
        return self.tree.live_cells + tails

    @property
    def held_cells(self) -> int:
        """Cells that hold tokens, including those of parked sequences."""
        if self.limits.shares_cells:
            return self.live_cells + self.tree.cells - self.tree.live_cells
        return self.live_cells + sum(self.tree.length(sequence_id) for sequence_id in self._parked)

    @property
    def promised_cells(self) -> int:
        """Cells that started prompts and commands under way will take."""
        prompts = sum(r.target - r.computed for r in self._residents.values() if r.prefilling)
        return prompts + sum(command.coming_cells for command in self._in_flight)

    @property
    def available_cells(self) -> int:
        """Cells that could be had now if all parked sequences were evicted."""
        return self.capacity - self.live_cells - self.promised_cells

    @property
    def free_cells(self) -> int:
        """Cells that could be had now without evicting anything. Releases count: the next command does them first."""
        return self.capacity - self.held_cells - self.promised_cells

    def kept_length(self, resident: Resident, victims: Iterable[Resident]) -> int:
        """Return how many first tokens of ``resident`` stay in the cache when all ``victims`` are swapped out."""
        if not self.limits.shares_cells or self.limits.whole_only or not resident.is_running:
            return 0
        return self.tree.shared_length(resident.sequence_id, frozenset(victim.sequence_id for victim in victims))

    def make_free(self, cells: int) -> None:
        """Evict parked sequences, least recently used first, until so many cells are free or none is left to evict."""
        if self.free_cells >= cells:
            return
        for sequence_id in [sequence_id for sequence_id in self._parked if sequence_id not in self._sources]:
            self._evict(sequence_id)
            if self.free_cells >= cells:
                return

    def evict_all(self) -> None:
        """Give up what all parked sequences hold."""
        for sequence_id in list(self._parked):
            self._evict(sequence_id)

    def flush(self) -> ShardPrefixes:
        """Give up what all parked sequences hold, and return it. The next command releases them."""
        found = self.prefixes
        self.evict_all()
        return found

    @property
    def prefixes(self) -> ShardPrefixes:
        """What parked sequences hold."""
        shares_cells = self.limits.shares_cells
        return ShardPrefixes(
            shard=self.name,
            cells=self.held_cells - self.live_cells,
            prefixes=tuple(
                CachedPrefix(
                    tokens=self.tree.length(sequence_id),
                    cells=self.tree.own_cells(sequence_id) if shares_cells else self.tree.length(sequence_id),
                    tenant=resident.sequence.spec.tenant.name,
                    adapter=resident.adapter,
                    last_used_s=resident.last_used_s,
                )
                for sequence_id, resident in self._parked.items()
            ),
        )

    # The start of a stay

    def place(self, sequence: Sequence, match: Match, priority: int) -> Resident:
        """Start ``sequence`` from the prefix that ``match`` found. It needs a command that carries its first chunk."""
        match = self._worth_copying(match)
        target = sequence.known_tokens
        source_id = next((key for key in match.sources if key in self._parked), None)
        if source_id is not None and self._should_take_over(source_id, match, target):
            self._move(self._parked[source_id], Status.GONE)
            self.tree.revive(source_id, match.length)
            sequence_id: int = source_id
        else:
            source_id = match.sources[0] if match.sources else None
            sequence_id = self._open(sequence, source_id, match.length)
        return self._enter(
            Resident(
                sequence,
                sequence_id,
                target=target,
                priority=priority,
                shared=match.length,
                computed=match.length,
                source_id=source_id,
            )
        )

    def restore(self, sequence: Sequence, ticket: SwapTicket, match: Match, priority: int) -> Resident:
        """Start ``sequence`` from its swapped cells, behind the prefix that ``match`` found. It needs a SwapIn."""
        source_id = match.sources[0] if ticket.start else None
        resident = Resident(
            sequence,
            self._open(sequence, source_id, ticket.start),
            target=ticket.target,
            priority=priority,
            shared=ticket.start,
            computed=ticket.length,
            source_id=source_id,
        )
        self._index(resident)
        return self._enter(resident)

    def _enter(self, resident: Resident) -> Resident:
        self._residents[resident.sequence_id] = resident
        self.make_free(0)
        return resident

    def _worth_copying(self, match: Match) -> Match:
        """Return ``match``, or no match where copying would cost more than computing."""
        limits = self.limits
        if limits.shares_cells or match.length >= max(_LEAST_COPY, limits.cells_per_sequence // _CELLS_PER_TOKEN):
            return match
        return NO_MATCH

    def _should_take_over(self, parked: int, match: Match, target: int) -> bool:
        """Whether to start in place of the parked source rather than beside it."""
        if parked in self._sources:
            return False
        held = self.tree.length(parked)
        if match.length == held:
            return True  # nothing is lost
        has_others = any(sequence_id not in self._sources | {parked} for sequence_id in self._parked)
        if not self._free_ids and not self._releasing and (not has_others or 2 * match.length >= held):
            return True
        evictable = self.held_cells - self.live_cells - (held - match.live_length)
        return self.free_cells + max(0, evictable) < target - match.length

    def _open(self, sequence: Sequence, source_id: int | None, length: int) -> int:
        """Return an id that holds the first ``length`` tokens of ``source_id``, or nothing."""
        if source_id is None:
            sequence_id = self._acquire_id()
            self.tree.insert(sequence_id, sequence.request.prefix_namespace)
            return sequence_id
        self._sources.add(source_id)
        sequence_id = self._acquire_id()
        if source_id in self._parked:  # it was of use: it is the last to be evicted
            source = self._parked[source_id] = self._parked.pop(source_id)
            source.last_used_s = self._now_s
        self.tree.fork(sequence_id, source_id, length)
        return sequence_id

    def _acquire_id(self) -> int:
        """Take an id that is free, or released by the next command, or that of a parked sequence."""
        if not self._free_ids:
            if not self._releasing:
                self._evict(next(key for key in self._parked if key not in self._sources))
            self._recycle_ids()
        return heapq.heappop(self._free_ids)  # the lowest: split caches batch neighbouring ids together

    # Commands

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """Commands that were sent and have not ended: at most a Decode and its successor."""
        return tuple(self._in_flight)

    @property
    def can_command(self) -> bool:
        """Whether nothing is under way, or a lone Decode, which yields to the next command."""
        return not self._in_flight or (len(self._in_flight) == 1 and self._in_flight[0].is_decode)

    @property
    def completes_prefill(self) -> bool:
        """Whether a Prefill is under way after which no prompt is left to compute."""
        return bool(self._in_flight) and self._in_flight[-1].completes_prefill(self.prefilling)

    @property
    def has_header(self) -> bool:
        """Whether the next command has something to do first."""
        return bool(self._releasing or self._recycled or self._parking or self._drop_handles)

    @property
    def next_header(self) -> Header:
        """What the next command does first."""
        return Header(
            release=(*self._recycled, *self._releasing),
            park=tuple(self._parking.items()),
            drop_handles=tuple(self._drop_handles),
        )

    def find_command(self, command_id: int) -> InFlight | None:
        """Return the command under way with this id, if there is one."""
        return next((one for one in self._in_flight if one.command.command_id == command_id), None)

    def send(self, command: Command, residents: Iterable[Resident]) -> None:
        """Note that ``command``, which has ``next_header`` and names ``residents``, is under way."""
        assert command.header == self.next_header, f"{self.name}: {command.header} is not {self.next_header}"
        self._recycle_ids()
        self._recycled, self._parking, self._drop_handles = [], {}, []
        self._sources.clear()
        self.release_now = False
        sent = InFlight(command, residents)
        self._in_flight.append(sent)
        if isinstance(command, Prefill):
            self.steps_since_prefill = 0
        if isinstance(command, Prefill | Decode):
            self.turn.take(next(iter(sent.residents.values())).adapter)

    def end_command(self, command: InFlight) -> None:
        """Note that no more replies come for ``command``."""
        self._in_flight.remove(command)

    def note_time(self, now_s: float) -> None:
        """Note the time of the events that follow, in seconds on the scheduler's clock."""
        self._now_s = now_s

    def drain(self) -> None:
        """Take no more sequences."""
        self.draining = True

    # Results

    def apply_step(self, command: InFlight, seconds: float) -> bool:
        """Apply a successful step but for its tokens. Return whether waiting requests may have got a chance by it."""
        command.steps_left -= 1
        turn_ended = self.turn.count_step()
        chunk_tokens = command.chunk_tokens
        if not chunk_tokens:
            self.steps_since_prefill += 1
            self.costs.beside_decodes.observe_decode(seconds)
            return turn_ended
        has_riders = len(chunk_tokens) < len(command.residents)
        cost = self.costs.beside_decodes if has_riders else self.costs.prefill_alone
        cost.observe_chunk(sum(chunk_tokens.values()), seconds)
        for sequence_id, tokens in chunk_tokens.items():
            resident = command.residents[sequence_id]
            if resident.status is Status.STARTING:
                self._move(resident, Status.RUNNING)
            if resident.is_live:
                resident.computed += tokens
                self._index(resident)
        return True

    def grow(self, resident: Resident) -> None:
        """Note that ``resident`` decoded a token: its token before that is in a cell now."""
        resident.computed += 1

    def fail_step(self, command: InFlight) -> list[Resident]:
        """Apply a step that changed nothing on the shard. Return residents whose stay it ended before it began."""
        command.fail()
        return self._undo_starts(command.starting)

    def _undo_starts(self, starting: Iterable[Resident]) -> list[Resident]:
        live = [resident for resident in starting if resident.is_live]
        for resident in live:
            self._remove(resident)
        for resident in starting:
            # The shard never used its id, unless it is that of a parked sequence.
            if resident.status is Status.RELEASING and not resident.takes_over:
                self._free_id(resident)
        return live

    def leave(self, resident: Resident) -> int:
        """Begin to swap ``resident`` out. Return the handle for its SwapOut."""
        self._move(resident, Status.LEAVING)
        return next(self._handles)

    def apply_swap_out(
        self, command: InFlight, saved: tuple[bool, ...], seconds: float
    ) -> list[tuple[Resident, SwapTicket | None]]:
        """End the stays of the entries. Return the live ones with tickets for what was saved."""
        assert isinstance(command.command, SwapOut), command.command
        cells = 0
        waiting: list[tuple[Resident, SwapTicket | None]] = []
        for entry, is_saved in zip(command.command.entries, saved, strict=True):
            resident = command.residents[entry.sequence_id]
            if resident.is_live:
                ticket = None
                if is_saved:
                    ticket = SwapTicket(
                        shard=self.name,
                        handle=entry.handle,
                        start=entry.start,
                        length=resident.computed,
                        target=resident.target,
                    )
                waiting.append((resident, ticket))
            elif is_saved:
                self._drop_handles.append(entry.handle)
            cells += resident.computed - entry.start if is_saved else 0
            self.tree.remove(resident.sequence_id)
            self._free_id(resident)
        self.costs.observe_swap(cells, seconds)
        return waiting

    def apply_swap_in(self, command: InFlight, restored: tuple[bool, ...], seconds: float) -> list[Resident]:
        """Apply which entries came back. Return the live ones that did not: their stay has ended."""
        results = list(zip(command.residents.values(), restored, strict=True))
        back = [resident for resident, is_restored in results if is_restored]
        for resident in back:
            if resident.status is Status.STARTING:
                self._move(resident, Status.RUNNING)
        self.costs.observe_swap(sum(resident.computed - resident.shared for resident in back), seconds)
        return self._undo_starts([resident for resident, is_restored in results if not is_restored])

    # The end of a stay

    def finish(self, resident: Resident) -> None:
        """End a stay whose last token was sampled. Park what it computed."""
        if resident.status is Status.LEAVING:
            self._move(resident, Status.DROPPED)
        elif self._parks:
            self._park(resident)
        else:
            self._remove(resident)

    def cancel(self, resident: Resident) -> None:
        """End a stay that nobody waits for, with a command at once. Park what it computed if that is known."""
        if resident.status is Status.LEAVING:
            self._move(resident, Status.DROPPED)
            return
        # A sequence that cannot be cut back to a length cannot be parked while it runs: its length is not known.
        if self._parks and not self.limits.whole_only and resident.is_running and not resident.prefilling:
            self._park(resident)
            self._parking[resident.sequence_id] = resident.computed
        else:
            self._remove(resident)
        self.release_now = True

    def take_back(self, resident: Resident) -> None:
        """End a stay because the cache is full, with a command at once. Nothing of it is kept."""
        self._remove(resident)
        self.release_now = True

    def drop_swapped(self, ticket: SwapTicket) -> None:
        """Let the shard forget what it saved for ``ticket``."""
        self._drop_handles.append(ticket.handle)

    def _remove(self, resident: Resident) -> None:
        """End a stay and give up what it holds; the next command releases its id."""
        self._move(resident, Status.RELEASING)
        self.tree.remove(resident.sequence_id)

    def _park(self, resident: Resident) -> None:
        self._index(resident)
        resident.last_used_s = self._now_s
        self.tree.park(resident.sequence_id)
        self._move(resident, Status.PARKED)

    def _evict(self, sequence_id: int) -> None:
        """Give up what a parked sequence holds."""
        self._parking.pop(sequence_id, None)
        self._remove(self._parked[sequence_id])

    # Bookkeeping

    def _index(self, resident: Resident) -> None:
        """Enter what ``resident`` has computed into the tree."""
        sequence_id = resident.sequence_id
        self.tree.extend(sequence_id, resident.sequence.tokens(self.tree.length(sequence_id), resident.computed))

    def _recycle_ids(self) -> None:
        """Free the ids that the next command releases; it may give them to others."""
        for resident in list(self._releasing.values()):
            self._recycled.append(resident.sequence_id)
            self._free_id(resident)

    def _free_id(self, resident: Resident) -> None:
        self._move(resident, Status.GONE)
        heapq.heappush(self._free_ids, resident.sequence_id)

    def _move(self, resident: Resident, status: Status) -> None:
        """Change the status of ``resident``, and with it the table that holds it."""
        assert status in TRANSITIONS[resident.status], (
            f"{self.name}: {resident.sequence_id} from {resident.status.word} to {status.word}"
        )
        before, after = self._table_of[resident.status], self._table_of.get(status)
        if after is not before:
            del before[resident.sequence_id]
            if after is not None:
                after[resident.sequence_id] = resident
        resident.status = status

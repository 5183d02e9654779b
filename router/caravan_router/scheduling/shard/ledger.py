"""The only writer of a shard's account: planner, step plan and scheduler call its operations."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from caravan_router.core.prefixes import ShardPrefixes
from caravan_router.scheduling.actions import Command, Decode, Evaluate, Prefill, Save, SaveEntry
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import LayoutSet, Loaded, Saved, SavedRun, ShardLimits
from caravan_router.scheduling.prefix_keys import BLOCK_TOKENS, cuts_between
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import PrefixChange, ShardAccount
from caravan_router.scheduling.shard.command import InFlight
from caravan_router.scheduling.shard.prefix_tree import NO_MATCH, Match, PrefixTree
from caravan_router.scheduling.shard.resident import TRANSITIONS, Resident, Status
from caravan_router.scheduling.shard.saved_runs import Eviction, SavedPrefix

# Copying a split sequence moves all of its cells: as long as computing one token for each so many of them.
_CELLS_PER_TOKEN = 256
_LEAST_COPY = 16
# Other sequences can start from residents in these states.
_SOURCES = (Status.RUNNING, Status.PARKED)


@dataclass(slots=True)
class Clock:
    """The time of the events that are being handled, in seconds. One clock serves all ledgers of a scheduler."""

    now_s: float = 0.0


class ShardLedger(ShardAccount):
    """Changes the account of a shard: each method is something that happened to it or was decided for it."""

    def __init__(self, name: str, limits: ShardLimits, config: SchedulerConfig, clock: Clock | None = None) -> None:
        super().__init__(name, limits, config)
        self._parks = config.prefix_caching
        self._clock = Clock() if clock is None else clock
        # Saves that were under way when everything was flushed.
        self._unwanted_saves: set[InFlight] = set()
        self._table_of = {
            Status.STARTING: self._residents,
            Status.LOADED: self._residents,
            Status.RUNNING: self._residents,
            Status.LEAVING: self._leaving,
            Status.DROPPED: self._leaving,
            Status.PARKED: self._parked,
            Status.RELEASING: self._releasing,
        }

    # Eviction

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
        """Give up what all parked sequences hold and all that is saved, and return it. The next command does it."""
        found = self.prefixes
        self.evict_all()
        self._dropped_runs += self.runs.keys
        self.runs.forget(self.runs.keys)
        self._unwanted_saves = {command for command in self._in_flight if isinstance(command.command, Save)}
        return found

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

    def load(self, sequence: Sequence, prefix: SavedPrefix, priority: int) -> Resident:
        """Start ``sequence`` from what was saved of it. It needs a Load, then a first chunk."""
        sequence_id = self._open(sequence, None, 0)
        resident = Resident(
            sequence,
            sequence_id,
            target=sequence.known_tokens,
            priority=priority,
            shared=prefix.length,
            computed=prefix.length,
            source_id=sequence_id,
        )
        self._tail_cells += resident.computed
        self._index(resident)
        self.runs.use(prefix)
        return self._enter(resident)

    def _enter(self, resident: Resident) -> Resident:
        self._residents[resident.sequence_id] = resident
        self._beams.add(resident)
        self.make_free(0)
        return resident

    def branch(self, sequence: Sequence, source: Resident, length: int) -> Resident:
        """Start ``sequence``, a beam, from the first ``length`` tokens of ``source``. It needs a row of its own."""
        can_copy = length > 0 and (length == source.computed or not self.layout.whole_only)
        match = Match(length, length, (source.sequence_id,)) if can_copy else NO_MATCH
        return self.place(sequence, match, source.priority)

    def _worth_copying(self, match: Match) -> Match:
        """Return ``match``, or no match where copying would cost more than computing."""
        layout = self.layout
        if layout.shares_cells or match.length >= max(_LEAST_COPY, layout.cells_per_sequence // _CELLS_PER_TOKEN):
            return match
        return NO_MATCH

    def _should_take_over(self, parked: int, match: Match, target: int) -> bool:
        """Whether to start in place of the parked source rather than beside it."""
        if parked in self._sources:
            return False
        held = self.tree.length(parked)
        if match.length == held or (not self.layout.shares_cells and self._parked[parked].is_expendable):
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
            source.last_used_s = self._clock.now_s
        self.tree.fork(sequence_id, source_id, length)
        return sequence_id

    def _acquire_id(self) -> int:
        """Take an id that is free, or released by the next command, or that of a parked sequence."""
        if not self._free_ids:
            if not self._releasing:
                evictable = [key for key in self._parked if key not in self._sources]
                self._evict(next((key for key in evictable if self._parked[key].is_expendable), evictable[0]))
            self._recycle_ids()
        return heapq.heappop(self._free_ids)  # the lowest: split caches batch neighbouring ids together

    # Commands

    def send(self, command: Command, residents: Iterable[Resident]) -> None:
        """Note that ``command``, which has ``next_header`` and names ``residents``, is under way."""
        assert command.header == self.next_header, f"{self.name}: {command.header} is not {self.next_header}"
        self._recycle_ids()
        self._recycled, self._parking, self._dropped_runs, self._spilled_runs = [], {}, [], []
        self._sources.clear()
        self.release_now = False
        sent = InFlight(command, residents)
        self._in_flight.append(sent)
        if isinstance(command, Prefill):
            self.steps_since_prefill = 0
        if isinstance(command, Prefill | Evaluate):
            self.busy_until_s = self._clock.now_s + self._expected_s(sent)
        if isinstance(command, Prefill | Decode | Evaluate):
            self.evaluated_last = isinstance(command, Evaluate)
            self.turn.take(next(iter(sent.residents.values())).adapter)

    def _expected_s(self, prefill: InFlight) -> float:
        """Return how many seconds a Prefill should take."""
        chunks = prefill.chunk_tokens
        tokens = sum(chunks.values())
        context = sum(prefill.residents[key].computed for key in chunks) // len(chunks)
        return self.costs.seconds(tokens, riders=len(prefill.residents) - len(chunks), context=context)

    def end_command(self, command: InFlight) -> None:
        """Note that no more replies come for ``command``."""
        self._in_flight.remove(command)

    def drain(self) -> None:
        """Take no more sequences."""
        if not self.draining:
            self.draining, self.draining_since_s = True, self._clock.now_s

    def note_prefixes_moved(self) -> None:
        """Note that what was saved of ended sequences was offered to other shards."""
        self.has_moved_prefixes = True

    def note_drained(self) -> None:
        """Note that nothing of it is needed any more."""
        self.is_drained = True

    # Results

    def apply_step(self, command: InFlight, seconds: float, *, tokens: int = 0, drafted: int = 0) -> bool:
        """Apply a successful step but for its tokens. Return whether waiting requests may have got a chance by it.

        ``tokens``: how many it sampled. ``drafted``: how many draft tokens it computed.
        """
        command.steps_left -= 1
        self.costs.observe_step(seconds)
        turn_ended = self.turn.count_step()
        chunk_tokens = command.chunk_tokens
        if not chunk_tokens:
            self.steps_since_prefill += 1
            command.cells_left -= tokens
            live = sum([one.status.is_live for one in command.residents.values()])
            self.costs.observe_decodes(live + drafted, seconds)
            return turn_ended
        if isinstance(command.command, Evaluate) and sum(chunk_tokens.values()) == len(chunk_tokens):
            self.costs.observe_decodes(len(chunk_tokens), seconds)
        else:
            self._observe_chunks(command, seconds)
        for sequence_id, tokens in chunk_tokens.items():
            resident = command.residents[sequence_id]
            if resident.status in (Status.STARTING, Status.LOADED):
                self._move(resident, Status.RUNNING)
            if resident.is_live:
                resident.computed += tokens
                self._tail_cells += tokens
                self._index(resident)
        return True

    def _observe_chunks(self, command: InFlight, seconds: float) -> None:
        tokens = sum(command.chunk_tokens.values())
        pairs = sum(count * command.residents[key].computed for key, count in command.chunk_tokens.items())
        riders = len(command.residents) - len(command.chunk_tokens)
        self.costs.observe_chunks(tokens, pairs / tokens, riders=riders, seconds=seconds)

    def extend(self, resident: Resident) -> None:
        """Note that ``resident``, a beam, has more tokens to compute."""
        resident.target = resident.sequence.known_tokens

    def grow(self, resident: Resident) -> None:
        """Note that ``resident`` decoded a token: its token before that is in a cell now."""
        resident.computed += 1
        self._tail_cells += 1

    def fail_step(self, command: InFlight) -> list[Resident]:
        """Apply a step that changed nothing on the shard. Return residents whose stay it ended before it began."""
        command.fail()
        live = [resident for resident in command.starting if resident.is_live]
        for resident in live:
            self._remove(resident)
        for resident in command.starting:
            # The shard never used its id, unless it is that of a parked sequence.
            if resident.status is Status.RELEASING and not resident.takes_over:
                self._free_id(resident)
        return live

    # Saving and loading

    def save(self, residents: Iterable[Resident], *, release: bool) -> list[SaveEntry]:
        """Make entries for a Save of what is not saved yet of ``residents``, running or parked ones.

        ``release``: their stays end with the Save. Runs that were used least recently make room. Parked sequences of
        which nothing needs to be saved get no entry.
        """
        entries: list[SaveEntry] = []
        cells = 0
        for resident in residents:
            keys, end = resident.sequence.keys, resident.computed
            known = self.runs.find(keys, end)
            if resident.status is Status.PARKED and (known.length == end or end < BLOCK_TOKENS):
                resident.is_expendable = True
                if release:
                    self._evict(resident.sequence_id)
                continue
            # Saving a prefix that is there already does nothing.
            start = known.length if known.length < end else 0
            if self.runs.whole_only:
                cuts = [end]
                start = 0
            else:
                cuts = cuts_between(start, end)
            entries.append(
                SaveEntry(
                    sequence_id=resident.sequence_id,
                    start=start,
                    cuts=tuple((cut, keys.at(cut)) for cut in cuts),
                    release=release,
                )
            )
            self.runs.use(known)
            cells += end - known.length
            if release:
                self._move(resident, Status.LEAVING if resident.is_live else Status.DROPPED)
                self._parking.pop(resident.sequence_id, None)
            else:
                resident.is_expendable = True
        self._note_eviction(self.runs.make_room(cells))
        return entries

    def expect_runs(self, size_bytes: int, keep: SavedPrefix) -> None:
        """Make room for runs of another shard, except by giving up ``keep``."""
        self._note_eviction(self.runs.make_room_for(size_bytes, keep))

    def discard_runs(self, runs: Iterable[SavedRun]) -> None:
        """Let the next command drop runs that nobody wants."""
        self._dropped_runs += [run.key for run in runs]

    def _note_eviction(self, eviction: Eviction) -> None:
        self._dropped_runs += eviction.dropped
        self._spilled_runs += eviction.spilled

    def note_runs(self, runs: Iterable[SavedRun]) -> None:
        """Note runs that were saved elsewhere, or before the shard joined; each comes after those before it."""
        for run in runs:
            self.runs.add(run)

    def apply_save(self, command: InFlight, reply: Saved) -> list[tuple[Resident, bool]]:
        """Note which runs are there, and end the stays of released sequences. Return the live ones, and if saved."""
        assert isinstance(command.command, Save), command.command
        cells = 0
        waiting: list[tuple[Resident, bool]] = []
        for entry, is_saved, size in zip(command.command.entries, reply.saved, reply.sizes_bytes, strict=True):
            resident = command.residents[entry.sequence_id]
            if is_saved:
                self._note_saved(command, resident, SavedRun(start=entry.start, cuts=entry.cuts, size_bytes=size))
                cells += entry.cuts[-1][0] - entry.start if size else 0
            if entry.release:
                if resident.is_live:
                    waiting.append((resident, is_saved))
                self._forget_cells(resident)
                self._free_id(resident)
        self._unwanted_saves.discard(command)
        self.costs.observe_copy(cells, reply.seconds)
        return waiting

    def _note_saved(self, command: InFlight, resident: Resident, run: SavedRun) -> None:
        if command in self._unwanted_saves:
            self._dropped_runs.append(run.key)
            return
        self.runs.add(run)
        # The runs before it count as used now, too, so that they are given up after it.
        self.runs.use(self.runs.find(resident.sequence.keys, run.cuts[-1][0]))

    def apply_load(self, command: InFlight, reply: Loaded) -> list[Resident]:
        """Apply which entries were loaded. Return the live ones that were not: their stay has ended."""
        self.runs.forget(reply.bad_runs)
        results = list(zip(command.residents.values(), reply.loaded, strict=True))
        lost = []
        for resident, is_loaded in results:
            if is_loaded and resident.is_live:
                self._move(resident, Status.LOADED)
            elif not is_loaded:
                if resident.is_live:
                    self._remove(resident)
                    lost.append(resident)
                self._free_id(resident)  # the shard does not hold it
        self.costs.observe_copy(sum(resident.shared for resident, is_loaded in results if is_loaded), reply.seconds)
        return lost

    # The layout

    def apply_layout(self, reply: LayoutSet) -> list[Resident]:
        """Apply a change of the layout. Return the live residents that were lost by it: their stay has ended."""
        before = self.limits
        # A shard that could not change would fail again.
        changed = reply.layout.shares_cells != before.layout.shares_cells
        self.limits = replace(before, layout=reply.layout, other_layout=before.layout if changed else None)
        self.layout_set_s = self._clock.now_s
        lost: list[Resident] = []
        for sequence_id in reply.lost:
            table = next(table for table in (self._residents, self._parked, self._releasing) if sequence_id in table)
            resident = table[sequence_id]
            if resident.is_live:
                lost.append(resident)
            if resident.status is not Status.RELEASING:
                self._parking.pop(sequence_id, None)
                self._remove(resident)
            self._free_id(resident)
        self._rebuild_tree()
        return lost

    def _rebuild_tree(self) -> None:
        """Enter every sequence on a path of its own: a sequence that was moved shares no cells with others."""
        self.tree = PrefixTree()
        self._tail_cells = sum(one.computed for one in (*self._residents.values(), *self._parked.values()))
        for resident in (*self._residents.values(), *self._parked.values()):
            self.tree.insert(resident.sequence_id, resident.sequence.request.prefix_namespace)
            if resident.status is not Status.LOADED:
                resident.shared = 0
            self._index(resident)
            if resident.status is Status.PARKED:
                self.tree.park(resident.sequence_id)

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
        is_known = resident.is_running and not resident.prefilling and not resident.is_beam
        if self._parks and not self.layout.whole_only and is_known:
            self._park(resident)
            self._parking[resident.sequence_id] = resident.computed
        else:
            self._remove(resident)
        self.release_now = True

    def take_back(self, resident: Resident) -> None:
        """End a stay because the cache is full, with a command at once. Nothing of it is kept."""
        self._remove(resident)
        self.release_now = True

    def _remove(self, resident: Resident) -> None:
        """End a stay and give up what it holds; the next command releases its id."""
        self._move(resident, Status.RELEASING)
        self._forget_cells(resident)

    def _park(self, resident: Resident) -> None:
        self._index(resident)
        resident.last_used_s = self._clock.now_s
        known = len(resident.landmarks)
        resident.landmarks = resident.sequence.landmarks(resident.computed)
        if len(resident.landmarks) > known:
            self._prefix_changes.append(PrefixChange(resident.landmarks[known:], is_new=True))
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
        known = self.tree.length(sequence_id)
        self._tail_cells -= resident.computed - known
        self.tree.extend(sequence_id, resident.sequence.tokens(known, resident.computed))

    def _forget_cells(self, resident: Resident) -> None:
        """Count the cells of ``resident`` no more."""
        self._tail_cells -= self.tail_cells(resident)
        self.tree.remove(resident.sequence_id)

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
            if before is self._residents:
                self._beams.remove(resident)
            del before[resident.sequence_id]
            if after is not None:
                after[resident.sequence_id] = resident
        if (resident.status in _SOURCES) != (status in _SOURCES):
            self._note_source(resident, status in _SOURCES)
        resident.status = status
        self._moves += 1

    def _note_source(self, resident: Resident, is_new: bool) -> None:
        """Note that others can start from ``resident``, or that they no longer can."""
        if is_new:
            resident.landmarks = resident.sequence.landmarks(resident.target)
        if resident.landmarks:
            self._prefix_changes.append(PrefixChange(resident.landmarks, is_new))

    def take_prefix_changes(self) -> list[PrefixChange]:
        """Return the changes since the last call, in order."""
        changes, self._prefix_changes = self._prefix_changes, []
        return changes

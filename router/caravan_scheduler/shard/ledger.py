"""The only writer of a shard's account: planner, step plan and scheduler call its operations."""

from collections.abc import Iterable
from typing import NamedTuple

from caravan_proto.messages.commands import Command, Save, SaveEntry
from caravan_proto.messages.results import LayoutSet, Loaded, Saved
from caravan_scheduler.core.prefixes import ShardPrefixes
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.prefix_keys import BLOCK_TOKENS
from caravan_scheduler.prefix_tree import Match
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.command import InFlight
from caravan_scheduler.shard.prefix_reuse import from_spared, to_take_over, worth_copying
from caravan_scheduler.shard.remembered import prefixes_of
from caravan_scheduler.shard.resident import Resident, Status
from caravan_scheduler.shard.saved_runs import SavedPrefix

# Cells come back in no smaller pieces, so that not every step cuts a sequence back.
_LEAST_CUT = 64


class NextId(NamedTuple):
    """The id that the next sequence gets, and the parked one that has it."""

    sequence_id: int
    evicted: Resident | None = None


def next_id(shard: ShardAccount) -> NextId:
    """Return the id that the next sequence gets: the lowest free one, or that of the first one to be evicted.

    In the split layout, llama.cpp computes neighbouring ids in one pass, and each gap between them takes one more. So
    there it is next to running ones, if such an id is free or of a sequence that is saved; the first one to run gets a
    free id with as many of these around it as there are.
    """
    free, residents, evictable = shard.stays.free_ids, shard.stays.residents, shard.header.in_order_of_eviction
    saved = [one for one in evictable if one.is_expendable]
    if not free and (not residents or not saved or shard.layout.shares_cells):
        one = (saved or evictable)[0]
        return NextId(one.sequence_id, one)
    if shard.layout.shares_cells:
        return NextId(min(free))
    takable: dict[int, Resident | None] = {one.sequence_id: one for one in saved} | dict.fromkeys(free)
    runs = _runs(takable)

    def rank(key: int) -> tuple[int, bool, int, int]:
        return -((key - 1 in residents) + (key + 1 in residents)), takable[key] is not None, -len(runs[key]), key

    chosen = min(takable if residents else free, key=rank)
    return NextId(chosen, takable[chosen])


def _runs(ids: Iterable[int]) -> dict[int, list[int]]:
    """Return the neighbours that each of ``ids`` is one of."""
    found: dict[int, list[int]] = {}
    run: list[int] = []
    for key in sorted(ids):
        if run and key != run[-1] + 1:
            run = []
        run.append(key)
        found[key] = run
    return found


class ShardLedger(ShardAccount):
    """Changes the account of a shard: each method is something that happened to it or was decided for it."""

    # Eviction

    def make_free(self, cells: int) -> None:
        """Evict parked sequences, or cut the last of them back, until ``cells`` are free or none is left."""
        if self.cells.free >= cells:
            return
        for resident in self.header.in_order_of_eviction:
            if not self._cut_back(resident, cells - self.cells.free):
                self._evict(resident)
            if self.cells.free >= cells:
                return

    def _cut_back(self, resident: Resident, cells: int) -> bool:
        """Give up the last ``cells`` of a parked sequence, if it has more than that. Return whether it had."""
        if not self.layout.shares_cells or self.layout.whole_only:
            return False
        length = resident.sequence.border(resident.computed - max(cells, _LEAST_CUT))
        if resident.computed - length >= self.cells.tree.own_cells((resident.sequence_id,)):
            return False
        self.cells.tree.truncate(resident.sequence_id, length)
        resident.computed = length
        self.stays.cut_back(resident, length)
        self.header.parked[resident.sequence_id] = length
        return True

    def evict_all(self) -> None:
        """Give up what all parked sequences hold."""
        self.evict(list(self.stays.parked.values()))

    def evict(self, parked: Iterable[Resident]) -> None:
        """Give up what ``parked`` sequences hold."""
        for resident in parked:
            self._evict(resident)

    def flush(self, key: bytes | None = None) -> ShardPrefixes:
        """Give up what is kept of ended sequences, or of it the prefix that ``key`` names, and return it.

        What other prefixes begin with is kept. The next command does it.
        """
        found = prefixes_of(self, key)
        for resident in list(self.stays.parked.values()):
            if key is None or resident.prefix_key == key:
                self._evict(resident)
        self.saves.give_up(key)
        return found

    def _evict(self, resident: Resident) -> None:
        """Give up what a parked sequence holds."""
        self.header.parked.pop(resident.sequence_id, None)
        self._remove(resident)

    # The start of a stay

    def place(self, sequence: Sequence, match: Match, priority: int) -> Resident:
        """Start ``sequence`` from the prefix that ``match`` found. It needs a command that carries its first chunk."""
        self.header.spared = self.held_against(sequence).ids
        match = from_spared(self, worth_copying(self, match))
        self._take_hashes(sequence, match)
        source_id = to_take_over(self, match, sequence.known_tokens)
        if source_id is not None:
            self.stays.move(self.stays.parked[source_id], Status.GONE)
            self.cells.tree.revive(source_id, match.length)
            sequence_id = source_id
        else:
            source_id = match.sources[0] if match.sources else None
            sequence_id = self._open(sequence, match)
        shared = match.length
        resident = Resident(sequence, sequence_id, source_id, priority, cached=shared, shared=shared)
        self.stays.enter(resident)
        self.checkpoints.begin(resident)
        self.make_free(0)
        return resident

    def load(self, sequence: Sequence, match: Match, prefix: SavedPrefix, priority: int) -> Resident:
        """Start ``sequence`` from what was saved of it. It needs a Load, then a first chunk.

        ``match``: what it begins with in the cells of another sequence, as `shared_by_load` returns it.
        """
        self.header.spared = self.held_against(sequence).ids
        self._take_hashes(sequence, match)
        sequence_id = self._open(sequence, match)
        # The tree learns of what is loaded once others can start from it, with the first chunk.
        self.cells.tails += prefix.length - match.length
        self.runs.use(prefix, loads=1, lifetime=sequence.lifetime)
        resident = Resident(sequence, sequence_id, sequence_id, priority, cached=prefix.length, shared=match.length)
        self.stays.enter(resident)
        self.checkpoints.begin(resident)
        self.make_free(0)
        return resident

    def _take_hashes(self, sequence: Sequence, match: Match) -> None:
        """Let ``sequence`` have the hashes of what it finds in the cells of another: hashing many tokens takes long."""
        for source_id in match.sources[:1]:
            source = self.stays.parked.get(source_id) or self.stays.residents.get(source_id)
            if source is not None:
                sequence.take_block_hashes(source.sequence, match.length)

    def _open(self, sequence: Sequence, match: Match) -> int:
        """Return an id that holds what the first source of ``match`` begins with, or nothing if there is none."""
        source_id = match.sources[0] if match.sources else None
        if source_id is not None:
            self.header.sources.add(source_id)
        sequence_id = self._acquire_id()
        if source_id is None:
            self.cells.tree.insert(sequence_id, sequence.request.prefix_namespace)
            return sequence_id
        if source_id in self.stays.parked:
            self.stays.note_use(source_id, self._clock.now_s)
        self.cells.tree.fork(sequence_id, source_id, match.length)
        return sequence_id

    def _acquire_id(self) -> int:
        """Take an id that is free, or released by the next command, or that of a parked sequence."""
        if not self.stays.free_ids:
            self.header.recycled.extend(self.stays.recycle())
        chosen = next_id(self)
        if chosen.evicted is not None:
            self._evict(chosen.evicted)
            self.header.recycled.extend(self.stays.recycle())
        self.stays.take_id(chosen.sequence_id)
        return chosen.sequence_id

    # Commands

    def send(self, command: Command, residents: Iterable[Resident]) -> None:
        """Note that ``command``, which has the `header` and names ``residents``, is under way."""
        assert command.header == self.header.message, f"{self.name}: {command.header} is not {self.header.message}"
        self.stays.recycle()
        self.header.clear()
        self.commands.begin(command, residents, self._clock.now_s)

    def apply_step(self, command: InFlight, seconds: float, *, tokens: int = 0, drafted: int = 0) -> bool:
        """Apply a successful step but for its tokens. Return whether waiting requests may have got a chance by it.

        ``tokens``: how many it sampled. ``drafted``: how many draft tokens it computed.
        """
        turn_ended = self.commands.end_step(command, seconds, tokens=tokens, drafted=drafted)
        self.commands.note_step(self._clock.now_s)
        for sequence_id, count in command.chunk_tokens.items():
            resident = command.residents[sequence_id]
            if resident.status in (Status.STARTING, Status.LOADED):
                self.stays.move(resident, Status.RUNNING)
            if resident.is_live:
                resident.computed += count
                self.stays.note_progress(resident)
                self.cells.tails += count
                self.cells.index(resident)
                if not resident.prefilling:
                    self.claims.note_prompt()
        return turn_ended or bool(command.chunk_tokens)

    def extend(self, resident: Resident) -> None:
        """Note that ``resident``, a beam, has more tokens to compute."""
        resident.target = resident.sequence.known_tokens
        self.stays.note_progress(resident)

    def take_tokens(
        self, command: InFlight, tokens: Iterable[tuple[int, GeneratedToken]]
    ) -> list[tuple[Sequence, GeneratedToken]]:
        """Return the tokens of a step whose requests wait for them: others ended while the shard was computing.

        Where one was decoded, the token before it is in a cell now.
        """
        residents, prefilled = command.residents, command.chunk_tokens
        taken = []
        decoded = 0
        for sequence_id, token in tokens:
            resident = residents[sequence_id]
            if resident.status.is_live:
                taken.append((resident.sequence, token))
                if sequence_id not in prefilled:
                    resident.computed += 1
                    decoded += 1
        self.cells.tails += decoded
        return taken

    def fail_step(self, command: InFlight) -> list[Resident]:
        """Apply a step that changed nothing on the shard. Return residents whose stay it ended before it began."""
        command.fail()
        live = [resident for resident in command.starting if resident.is_live]
        for resident in live:
            self._remove(resident)
        for resident in command.starting:
            # The shard never used its id, unless it is that of a parked sequence.
            if resident.status is Status.RELEASING and not resident.takes_over:
                self.stays.free(resident)
        return live

    # Saving and loading

    def save(self, residents: Iterable[Resident], *, release: bool) -> list[SaveEntry]:
        """Make entries for a Save of what is not saved yet of ``residents``, running or parked ones.

        ``release``: their stays end with the Save. Runs that were used least recently make room. Parked sequences of
        which nothing needs to be saved get no entry.
        """
        entries: list[SaveEntry] = []
        for resident in residents:
            end = resident.computed
            known = self.runs.find(resident.sequence.keys, end)
            if resident.status is Status.PARKED and (known.length == end or end < BLOCK_TOKENS):
                resident.is_expendable = True
                if release:
                    self._evict(resident)
                continue
            entries += self.saves.entries_of(resident, release=release)
            self.runs.use(known, lifetime=resident.sequence.lifetime)
            if release:
                self.stays.move(resident, Status.LEAVING if resident.is_live else Status.DROPPED)
                self.header.parked.pop(resident.sequence_id, None)
            else:
                resident.is_expendable = True
        self.saves.make_room(entries)
        return entries

    def note_pin(self) -> None:
        """Note that a prefix was pinned: sequences that hold it in cells only are saved soon."""
        for resident in self.stays.parked.values():
            if self.saves.lacks_pinned(resident):
                resident.is_to_be_saved, resident.is_expendable = True, False

    def apply_save(self, command: InFlight, reply: Saved) -> list[tuple[Resident, bool]]:
        """Note which runs are there, and end the stays of released sequences. Return the live ones, and if saved."""
        assert isinstance(command.command, Save), command.command
        cells = states = 0
        waiting: list[tuple[Resident, bool]] = []
        for entry, is_saved, size in zip(command.command.entries, reply.saved, reply.sizes_bytes, strict=True):
            resident = command.residents[entry.sequence_id]
            if is_saved:
                self.saves.note_saved(resident, entry, size)
                cells += entry.end - entry.start if size else 0
                states += entry.is_state and size > 0
            if entry.release:
                if resident.is_live:
                    waiting.append((resident, is_saved))
                self.cells.forget(resident)
                self.stays.free(resident)
        self.saves.drop_unwanted(command)
        self.costs.observe_copy(cells, reply.seconds, states=states)
        return waiting

    def apply_load(self, command: InFlight, reply: Loaded) -> list[Resident]:
        """Apply which entries were loaded. Return the live ones that were not: their stay has ended."""
        self.runs.forget(reply.bad_runs)
        results = list(zip(command.residents.values(), reply.loaded, strict=True))
        lost = []
        for resident, is_loaded in results:
            if is_loaded and resident.is_live:
                self.stays.move(resident, Status.LOADED)
            elif not is_loaded:
                if resident.is_live:
                    self._remove(resident)
                    lost.append(resident)
                self.stays.free(resident)  # the shard does not hold it
        loaded = [resident for resident, is_loaded in results if is_loaded]
        cells = sum(resident.cached - resident.shared for resident in loaded)
        states = 0 if self.runs.states is None else len(loaded)
        self.costs.observe_copy(cells, reply.seconds, states=states)
        return lost

    def apply_layout(self, reply: LayoutSet) -> list[Resident]:
        """Apply a change of the layout. Return the live residents that were lost by it: their stay has ended."""
        if reply.layout.shares_cells != self.layout.shares_cells:
            self.costs.change_layout()
        self.capacity.set_layout(reply.layout, self._clock.now_s)
        tables = (self.stays.residents, self.stays.parked, self.stays.releasing)
        gone = [next(table for table in tables if key in table)[key] for key in reply.lost]
        lost = [resident for resident in gone if resident.is_live]
        for resident in gone:
            if resident.status is not Status.RELEASING:
                self._evict(resident)
            self.stays.free(resident)
        self.cells.rebuild(shares_beginnings=reply.shares_beginnings)
        return lost

    # The end of a stay

    def finish(self, resident: Resident) -> None:
        """End a stay whose last token was sampled. Park what it computed."""
        if resident.status is Status.LEAVING:
            self.stays.move(resident, Status.DROPPED)
        elif self._parks:
            self._park(resident)
        else:
            self._remove(resident)

    def cancel(self, resident: Resident, *, at_rest: bool = False, keeps: bool = True) -> None:
        """End a stay that cannot go on, with a command at once. Park what it computed if that is known.

        ``at_rest``: no command under way computes more of it. ``keeps``: it is of use to others.
        """
        if resident.status is Status.LEAVING:
            self.stays.move(resident, Status.DROPPED)
            return
        # A sequence that cannot be cut back to a length cannot be parked while it runs: its length is not known.
        is_known = resident.is_running and not resident.prefilling and not resident.is_beam
        if keeps and self._parks and (at_rest or (not self.layout.whole_only and is_known)):
            self._park(resident)
            self.header.parked[resident.sequence_id] = resident.computed
        else:
            self._remove(resident)
        self.header.is_urgent = True

    def take_back(self, resident: Resident) -> None:
        """End a stay because the cache is full, with a command at once. Nothing of it is kept."""
        self._remove(resident)
        self.header.is_urgent = True

    def _remove(self, resident: Resident) -> None:
        """End a stay and give up what it holds; the next command releases its id."""
        self.stays.move(resident, Status.RELEASING)
        self.cells.forget(resident)

    def _park(self, resident: Resident) -> None:
        resident.is_expendable = False  # it may have grown since it was saved
        self.cells.index(resident)
        self.cells.tree.park(resident.sequence_id)
        self.stays.move(resident, Status.PARKED)
        self.stays.note_use(resident.sequence_id, self._clock.now_s)
        resident.is_to_be_saved = self.saves.is_to_be_saved(resident)

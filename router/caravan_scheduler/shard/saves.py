"""What a shard saves of sequences, and which saved runs give way to that."""

from collections.abc import Collection, Iterable
from itertools import pairwise

from caravan_proto.messages.commands import RunNote, Save, SaveEntry
from caravan_proto.messages.limits import Saving
from caravan_scheduler.core.prompt_media import token_array
from caravan_scheduler.events import SavedRun
from caravan_scheduler.prefix_keys import BLOCK_TOKENS, cuts_between, state_key
from caravan_scheduler.shard.capacity import ShardCapacity
from caravan_scheduler.shard.checkpoints import thinned
from caravan_scheduler.shard.command import InFlight, NextHeader, ShardCommands
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.saved_runs import Eviction, SavedPrefix, SavedRuns, Tier

# Checkpoints of one sequence that are kept while the memory for saved runs is not half full.
_MOST_CHECKPOINTS = 32


class ShardSaves:
    """Changes ``runs``, and lets the next command do what the shard must do for that."""

    def __init__(self, runs: SavedRuns, capacity: ShardCapacity, commands: ShardCommands, header: NextHeader) -> None:
        self._runs = runs
        self._capacity = capacity
        self._commands = commands
        self._header = header
        # Saves under way, each with the key of a run that was given up since, in order.
        self._unwanted: dict[tuple[InFlight, bytes], None] = {}

    @property
    def are_possible(self) -> bool:
        """Whether cells of sequences can be saved."""
        has_memory = self._runs.capacity_bytes[Tier.MEMORY] > 0
        return has_memory and self._capacity.limits.layout.saving is not Saving.NOTHING

    def lacks_pinned(self, resident: Resident) -> bool:
        """Whether a pinned prefix of ``resident`` is not saved."""
        pins = self._runs.pins.within(resident.sequence.keys, resident.computed)
        return any(pin.length >= BLOCK_TOKENS and not self._runs.holding(pin.key) for pin in pins)

    def is_to_be_saved(self, resident: Resident) -> bool:
        """Whether a parked ``resident`` is saved before others may take its cells: it is pinned, or is to stay."""
        if self.lacks_pinned(resident):
            return True
        return resident.sequence.lifetime is not None and self.are_possible and resident.computed >= BLOCK_TOKENS

    def entries_of(self, resident: Resident, *, release: bool) -> list[SaveEntry]:
        """Make entries for what is computed of ``resident`` and not saved, or for all if that is all.

        A pinned prefix gets a run that ends with it, so that no more than that is kept.
        """
        keys, end = resident.sequence.keys, resident.computed
        covered = self._runs.covered(keys, end)
        known = covered if covered == end else resident.sequence.border(covered)
        ends = [end]
        if self._runs.states is not None:
            # The state is an entry of its own, and the last.
            cells = [] if known == end else [_cells_entry(resident, known, end)]
            return [*cells, _state_entry(resident, release=release)]
        # Saving a prefix that is there already does nothing.
        start = known if known < end else 0
        if start == known:
            ends[:0] = [pin.length for pin in self._runs.pins.within(keys, end - 1) if pin.length > start]
        return [
            _cells_entry(resident, first, until, release=release and until == end)
            for first, until in pairwise([start, *ends])
        ]

    # Changes, which the ledger makes

    def make_room(self, entries: Collection[SaveEntry]) -> None:
        """Make room for the ``entries`` of a Save: runs that were used least recently give way."""
        new = [entry for entry in entries if entry.cuts[-1][1] not in self._runs]
        cells, states = sum(entry.end - entry.start for entry in new), sum(entry.is_state for entry in new)
        self._note_eviction(self._runs.make_room(self._runs.bytes_of(cells, states=states)), entries)

    def expect(self, size_bytes: int, keep: SavedPrefix) -> None:
        """Make room for runs of another shard, except by giving up ``keep``."""
        self._note_eviction(self._runs.make_room(size_bytes, keep))

    def _note_eviction(self, eviction: Eviction, entries: Iterable[SaveEntry] = ()) -> None:
        starts = self._starts_under_way() | {entry.own_note.before for entry in entries}
        self._header.dropped_runs.extend((*eviction.dropped, *self._runs.drop_unneeded(starts)))
        self._header.spilled_runs.extend(eviction.spilled)

    def _starts_under_way(self, replied: InFlight | None = None) -> set[bytes]:
        """Return the keys at which the runs start that are being saved, but for those of a Save that was replied to."""
        commands = (command for command in self._commands.in_flight if command is not replied)
        return {entry.own_note.before for command in commands for entry in _entries_of(command)}

    def note_runs(self, runs: Iterable[SavedRun]) -> None:
        """Note runs that were saved elsewhere, or before the shard joined; each comes after those before it.

        They count as used after those that start in them.
        """
        for run in reversed([*runs]):
            self._runs.add(run)
        self._header.dropped_runs.extend(self._runs.drop_unneeded(self._starts_under_way()))

    def note_saved(self, resident: Resident, entry: SaveEntry, size_bytes: int) -> None:
        """Note that ``entry`` of ``resident`` was saved."""
        run = SavedRun(start=entry.start, cuts=entry.cuts, size_bytes=size_bytes, note=entry.own_note)
        self._runs.add(run)
        # The runs before it count as used now, too, so that they are given up after it.
        found = self._runs.find(resident.sequence.keys, entry.end)
        self._runs.use(found, lifetime=resident.sequence.lifetime)
        if entry.is_state:
            if found.length < entry.end:
                self.drop(entry.own_note.before)  # its cells were not saved
            self._thin(resident, entry.end)

    def _thin(self, resident: Resident, end: int) -> None:
        """Give up some of the checkpoints of ``resident`` before ``end``, but none that several have continued from."""
        assert self._runs.states is not None
        runs = list(self._runs.states.backwards(resident.sequence.keys, end))[::-1]
        pinned = self._runs.pinned
        kept = {run.end for run in runs if run.loads > 1 or run.key in pinned}
        is_scarce = 2 * self._runs.memory_room < self._runs.capacity_bytes[Tier.MEMORY]
        gone = set(thinned([run.end for run in runs], kept, 0 if is_scarce else _MOST_CHECKPOINTS))
        for run in runs:
            if run.end in gone:
                self.drop(run.prefix_key)

    def drop_unwanted(self, command: InFlight) -> None:
        """Let the next command drop what ``command`` has saved though it was given up meanwhile."""
        for unwanted in [pair for pair in self._unwanted if pair[0] is command]:
            del self._unwanted[unwanted]
            self._header.dropped_runs.extend(self._runs.drop(unwanted[1], self._starts_under_way(command)))

    def drop(self, key: bytes) -> None:
        """Let the next command drop the run with this key, as soon as no other run begins with it."""
        self._header.dropped_runs.extend(self._runs.drop(key, self._starts_under_way()))

    def give_up(self, key: bytes | None) -> None:
        """Let the next command drop all runs, or the one with this ``key``. What is being saved follows later."""
        for command in self._commands.in_flight:
            ends = [_prefix_key(entry) for entry in _entries_of(command)]
            self._unwanted |= {(command, end): None for end in ends if key in (None, end)}
        if key is not None:
            self.drop(key)
            return
        self._header.dropped_runs.extend(self._runs.keys)
        self._runs.forget(self._runs.keys)


def _entries_of(command: InFlight) -> Iterable[SaveEntry]:
    return command.command.entries if isinstance(command.command, Save) else ()


def _prefix_key(entry: SaveEntry) -> bytes:
    """Return the key of the prefix that ``entry`` ends with."""
    return entry.own_note.before if entry.is_state else entry.cuts[-1][1]


def _cells_entry(resident: Resident, start: int, end: int, *, release: bool = False) -> SaveEntry:
    sequence = resident.sequence
    cuts = sequence.with_borders(cuts_between(start, end), start)
    return SaveEntry(
        sequence_id=resident.sequence_id,
        start=start,
        cuts=tuple((cut, sequence.keys.at(cut)) for cut in cuts),
        release=release,
        note=_note_of(resident, start, end),
    )


def _state_entry(resident: Resident, *, release: bool) -> SaveEntry:
    end = resident.computed
    return SaveEntry(
        sequence_id=resident.sequence_id,
        start=end,
        cuts=((end, state_key(resident.prefix_key)),),
        release=release,
        note=_note_of(resident, end, end),
    )


def _note_of(resident: Resident, start: int, end: int) -> RunNote:
    sequence = resident.sequence
    return RunNote(
        before=sequence.keys.at(start),
        # They are there as long as the run is.
        tokens=token_array(sequence.tokens(start, end)),
        tenant=sequence.spec.tenant.name,
        adapter=resident.adapter,
    )

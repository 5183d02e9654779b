"""Which cells a shard keeps outside its cache, in host memory and on disk, and which of them make way for others."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from caravan_proto.messages.commands import RunNote, RunSlice
from caravan_scheduler.config import Clock
from caravan_scheduler.events import SavedRun
from caravan_scheduler.lifetimes import Kept, Lifetime, longer, within_shares
from caravan_scheduler.pins import Pin, Pins
from caravan_scheduler.prefix_keys import BLOCK_TOKENS, PrefixKeys

# Pinned prefixes take at most the memory divided by this, and so do all that stay while their lifetimes last.
_PINNED_SHARE = 2


class Tier(Enum):
    """Where a run is."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(slots=True, eq=False)
class KeptRun:
    """The cells [start, end) of a prefix, named by the key of its end. ``cuts``: positions and keys of its cuts.

    One without cells is the recurrent state at the end of a prefix, and has a key of its own.

    ``used_s``: when it was saved or last loaded, in seconds on the scheduler's clock. Prefixes are found in it up to
    ``usable_end``: its end, unless it was dropped. ``loads``: how many sequences were loaded with it as their last run.
    ``lifetime``: the longest that was asked for.
    """

    start: int
    cuts: tuple[tuple[int, bytes], ...]
    size_bytes: int
    tier: Tier
    note: RunNote
    used_s: float
    usable_end: int
    loads: int = 0
    lifetime: Lifetime | None = None

    @property
    def key(self) -> bytes:
        return self.cuts[-1][1]

    @property
    def end(self) -> int:
        return self.cuts[-1][0]

    @property
    def is_state(self) -> bool:
        return self.start == self.end

    @property
    def prefix_key(self) -> bytes:
        """The key of the prefix that it ends."""
        return self.note.before if self.is_state else self.key


class SavedStates:
    """The runs that are states, by the keys of the prefixes that they end."""

    def __init__(self) -> None:
        self._states: dict[bytes, KeptRun] = {}
        # How many there are at each length.
        self._ends: Counter[int] = Counter()
        # The largest size of a state seen, in bytes.
        self.size_bytes = 0

    def get(self, key: bytes) -> KeptRun | None:
        """Return the state at the end of the prefix that ``key`` names."""
        return self._states.get(key)

    def backwards(self, keys: PrefixKeys, most: int) -> Iterator[KeptRun]:
        """Yield the states within the first ``most`` tokens of a sequence, the last one first."""
        for end in sorted((end for end in self._ends if end <= most), reverse=True):
            state = self._states.get(keys.at(end))
            if state is not None:
                yield state

    # Changes

    def add(self, run: KeptRun) -> None:
        """Note a state."""
        self._states[run.prefix_key] = run
        self._ends[run.end] += 1
        self.size_bytes = max(self.size_bytes, run.size_bytes)

    def forget(self, run: KeptRun) -> None:
        """Note that the shard no longer has this state."""
        del self._states[run.prefix_key]
        self._ends[run.end] -= 1
        if not self._ends[run.end]:
            del self._ends[run.end]


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """The first ``length`` tokens of a sequence, as slices of saved runs without gaps."""

    length: int = 0
    slices: tuple[RunSlice, ...] = ()

    def behind(self, length: int) -> tuple[RunSlice, ...]:
        """Return the slices without the cells of the first ``length`` tokens."""
        return tuple(
            RunSlice(piece.key, max(piece.start, length), piece.end) for piece in self.slices if piece.end > length
        )


NO_PREFIX = SavedPrefix()


@dataclass(frozen=True, slots=True)
class Eviction:
    """Keys of runs that are given up, and of runs that move from memory to disk."""

    dropped: tuple[bytes, ...] = ()
    spilled: tuple[bytes, ...] = ()


class SavedRuns:
    """The saved runs of one shard. The router decides what leaves memory and disk: what was used least recently.

    A run is used with the runs before it, and these count as used after it: they are given up last. Runs that hold a
    pinned prefix are not given up for others, nor are those whose lifetime has not ended while the share of their
    tenant pays for them. Where there is recurrent state, a prefix ends only where one is saved.
    """

    def __init__(
        self,
        memory_bytes: int,
        disk_bytes: int,
        *,
        with_state: bool,
        clock: Clock | None = None,
        pins: Pins | None = None,
    ) -> None:
        """``with_state``: there is recurrent state."""
        self._clock = clock or Clock()
        self.pins = pins or Pins()
        self.capacity_bytes = {Tier.MEMORY: memory_bytes, Tier.DISK: disk_bytes}
        # The recurrent states, which are runs too; None where there is none.
        self.states = SavedStates() if with_state else None
        self.used_bytes = {Tier.MEMORY: 0, Tier.DISK: 0}
        # By key, least recently used first.
        self._runs: OrderedDict[bytes, KeptRun] = OrderedDict()
        # By the keys of their cuts.
        self._cuts: dict[bytes, KeptRun] = {}
        # Keys of runs that are kept only for the runs that begin inside them. In order, since the order of a set of
        # bytes differs from process to process, and a recording is played again in another one.
        self._dropped: dict[bytes, None] = {}
        # The largest size of a cell seen, in bytes.
        self.cell_bytes = 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._runs

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of all runs, least recently used first."""
        return tuple(self._runs)

    def add(self, run: SavedRun) -> None:
        """Note a run that the shard has. One with a known key changes nothing, but that it is wanted again."""
        known = self._runs.get(run.key)
        if known is not None:
            if run.key in self._dropped and not run.is_dropped:
                del self._dropped[run.key]
                known.usable_end = known.end
                if not known.is_state:
                    self._register(known)
            return
        if run.is_dropped:
            self._dropped[run.key] = None
        added = self._runs[run.key] = KeptRun(
            start=run.start,
            cuts=run.cuts,
            size_bytes=run.size_bytes,
            tier=Tier.DISK if run.on_disk else Tier.MEMORY,
            note=run.note,
            used_s=self._clock.now_s,
            usable_end=run.cuts[-1][0],
            lifetime=run.lifetime,
        )
        self.used_bytes[added.tier] += run.size_bytes
        if not added.is_state:
            self.cell_bytes = max(self.cell_bytes, run.size_bytes / (added.end - added.start))
            self._register(added)
        elif self.states is not None:
            self.states.add(added)

    def _register(self, run: KeptRun) -> None:
        for position, key in run.cuts:
            if position <= run.usable_end:
                self._cuts.setdefault(key, run)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the shard no longer has these runs."""
        for key in keys:
            run = self._runs.pop(key, None)
            if run is not None:
                self._dropped.pop(key, None)
                self.used_bytes[run.tier] -= run.size_bytes
                if run.is_state and self.states is not None:
                    self.states.forget(run)
                for _, cut in run.cuts:
                    if self._cuts.get(cut) is run:
                        del self._cuts[cut]

    # Questions

    def find(self, keys: PrefixKeys, known: int, most: int | None = None) -> SavedPrefix:
        """Return the longest saved prefix of ``known`` tokens, at most the first ``most`` of it."""
        most = known if most is None else most
        if self.states is None:
            return self._prefix(keys, self._cut_length(keys, known), most)
        for state in self.states.backwards(keys, self._cut_length(keys, most)):
            cells = self._prefix(keys, state.end, state.end)
            if cells.length == state.end:
                return SavedPrefix(state.end, (*cells.slices, RunSlice(state.key, state.end, state.end)))
        return NO_PREFIX

    def covered(self, keys: PrefixKeys, known: int) -> int:
        """Return of how many of the first ``known`` tokens the cells are saved."""
        return self._prefix(keys, self._cut_length(keys, known), known).length

    def _cut_length(self, keys: PrefixKeys, known: int) -> int:
        blocks = 0
        while (blocks + 1) * BLOCK_TOKENS <= known and keys.at((blocks + 1) * BLOCK_TOKENS) in self._cuts:
            blocks += 1
        length = blocks * BLOCK_TOKENS
        ends = range(min(length + BLOCK_TOKENS - 1, known), length, -1)
        return next((end for end in ends if keys.at(end) in self._cuts), length)

    def _prefix(self, keys: PrefixKeys, length: int, most: int) -> SavedPrefix:
        """Return the first ``most`` tokens of the prefix that ends with the cut at ``length``.

        Where the beginning of a run was given up before the run, return those of the longest shorter one.
        """
        while length:
            slices: list[RunSlice] = []
            end = length
            while end > 0 and (run := self._cuts.get(keys.at(end))) is not None:
                if run.start < most:
                    slices.append(RunSlice(run.key, run.start, min(end, most)))
                end = run.start
            if not end:
                return SavedPrefix(min(length, most), tuple(reversed(slices)))
            length = self._cut_length(keys, end - 1)
        return NO_PREFIX

    def has_beginning(self, keys: PrefixKeys, known: int) -> bool:
        """Whether anything is saved of ``known`` tokens, of which there is at least a block."""
        return known >= BLOCK_TOKENS and keys.at(BLOCK_TOKENS) in self._cuts

    @property
    def listed(self) -> dict[bytes, list[KeptRun]]:
        """The prefixes that sequences can be found with, by key, each with the runs that end it."""
        found: dict[bytes, list[KeptRun]] = {}
        for key, run in self._runs.items():
            if key not in self._dropped:
                found.setdefault(run.prefix_key, []).append(run)
        if self.states is not None:
            return {key: runs for key, runs in found.items() if any(run.is_state for run in runs)}
        return found

    def holding(self, key: bytes) -> tuple[KeptRun, ...]:
        """Return the runs that hold the prefix that ``key`` names, in order; empty unless all of it is there."""
        found: list[KeptRun] = []
        if self.states is not None:
            state = self.states.get(key)
            if state is None:
                return ()
            found.append(state)
        run = self._cuts.get(key)
        while run is not None and (not found or run.start < found[-1].start):
            found.append(run)
            if run.start == 0:
                return tuple(reversed(found))
            run = self._cuts.get(run.note.before)
        return ()

    def describe(self, keys: Iterable[bytes]) -> list[SavedRun]:
        """Return the runs of these keys that there are, each after those that end where it starts."""
        found = sorted((self._runs[key] for key in keys if key in self._runs), key=lambda run: run.start)
        return [
            SavedRun(
                start=run.start,
                cuts=run.cuts,
                size_bytes=run.size_bytes,
                note=run.note,
                is_dropped=run.key in self._dropped,
                lifetime=run.lifetime,
            )
            for run in found
        ]

    def describe_recent(self, most_bytes: int, without: "SavedRuns") -> list[SavedRun]:
        """Return the most recently used runs that ``without`` lacks, ``most_bytes`` together at most."""
        keys = []
        for key, run in reversed(self._runs.items()):
            if key in without:
                continue
            most_bytes -= run.size_bytes
            if most_bytes < 0:
                break
            keys.append(key)
        return self.describe(keys)

    @property
    def memory_room(self) -> int:
        """Bytes of memory that are free."""
        return self.capacity_bytes[Tier.MEMORY] - self.used_bytes[Tier.MEMORY]

    def has_room(self, cells: int, unused_s: float) -> bool:
        """Whether so many cells could be saved in memory without giving up runs used within ``unused_s`` seconds."""
        oldest = next(iter(self._runs.values()), None)
        is_old = oldest is not None and self._clock.now_s - oldest.used_s > unused_s
        return is_old or self.bytes_of(cells) <= self.memory_room

    # Pins

    @property
    def pin_limit(self) -> int:
        """Most bytes of the runs that hold pinned prefixes."""
        return self.capacity_bytes[Tier.MEMORY] // _PINNED_SHARE

    @property
    def pinned(self) -> dict[bytes, int]:
        """The runs that are not given up for others: their keys and sizes in bytes.

        They hold pinned prefixes, the first pinned first, as far as the limit allows.
        """
        kept: dict[bytes, int] = {}
        for pin in self.pins:
            more = {run.key: run.size_bytes for run in self.holding(pin.key)}
            if sum((kept | more).values()) <= self.pin_limit:
                kept |= more
        return kept

    # Changes

    def use(self, prefix: SavedPrefix, *, loads: int = 0, lifetime: Lifetime | None = None) -> None:
        """Note that ``prefix`` is wanted now, how many sequences are loaded from it, and how long it should stay."""
        for piece in reversed(prefix.slices):
            run = self._runs[piece.key]
            run.used_s, run.lifetime = self._clock.now_s, longer(run.lifetime, lifetime)
            self._runs.move_to_end(piece.key)
        if loads:
            self._runs[prefix.slices[-1].key].loads += loads

    def drop(self, key: bytes, needed: Collection[bytes] = ()) -> list[bytes]:
        """Give up the run with this key. Return the keys of the runs that the shard is to forget.

        What others begin with stays: the runs that start at a cut of it, and those that will start at keys ``needed``.
        So do pinned prefixes that end in it.
        """
        found = [self._runs.get(key)]
        if self.states is not None:
            found += [self.states.get(key), self._cuts.get(key)]
        self._dropped |= {run.key: None for run in found if run is not None}
        return self.drop_unneeded(needed)

    def drop_unneeded(self, needed: Collection[bytes] = ()) -> list[bytes]:
        """Give up the dropped runs that no other begins with any more. See `drop`."""
        gone: list[bytes] = []
        has_changed = False
        while self._dropped:
            pinned = {pin.key for pin in self.pins}
            starts = {run.note.before for run in self._runs.values()} | pinned | set(needed)
            for key in self._dropped:
                run = self._runs[key]
                if run.is_state:
                    run.usable_end = run.end if run.prefix_key in pinned else 0
                    continue
                end = next((position for position, cut in reversed(run.cuts) if cut in starts), 0)
                has_changed |= end != run.usable_end
                run.usable_end = end
            found = [key for key in self._dropped if self._runs[key].usable_end == 0]
            has_changed |= not all(self._runs[key].is_state for key in found)
            self.forget(found)
            gone += found
            if not found:
                if has_changed:
                    self._cuts.clear()
                    for run in self._runs.values():
                        if not run.is_state:
                            self._register(run)
                break
        return gone

    def bytes_of(self, cells: int, *, states: int = 1) -> int:
        """Return the size of runs of ``cells`` cells and of so many states, if there are any, as far as is known."""
        state_bytes = 0 if self.states is None else states * self.states.size_bytes
        return int(cells * self.cell_bytes) + state_bytes

    def make_room(self, wanted: int, keep: SavedPrefix = NO_PREFIX) -> Eviction:
        """Make room in memory for ``wanted`` bytes."""
        kept = {piece.key for piece in keep.slices} | self.pinned.keys()
        dropped: list[bytes] = []
        spilled: list[bytes] = []
        for run in self._beyond(Tier.MEMORY, wanted, kept):
            if 0 < run.size_bytes <= self.capacity_bytes[Tier.DISK]:
                self.used_bytes[Tier.MEMORY] -= run.size_bytes
                self.used_bytes[Tier.DISK] += run.size_bytes
                run.tier = Tier.DISK
                spilled.append(run.key)
            else:
                dropped.append(run.key)
                self.forget([run.key])
        for run in self._beyond(Tier.DISK, 0, kept):
            dropped.append(run.key)
            self.forget([run.key])
        return Eviction(tuple(dropped), tuple(spilled))

    def _beyond(self, tier: Tier, wanted: int, kept: set[bytes]) -> list[KeptRun]:
        """Return the runs that must leave ``tier`` so that ``wanted`` bytes are free there."""
        excess = self.used_bytes[tier] + wanted - self.capacity_bytes[tier]
        found: list[KeptRun] = []
        if excess <= 0:
            return found
        if tier is Tier.DISK or not self.capacity_bytes[Tier.DISK]:  # from the one before it, runs only move
            most = self.capacity_bytes[tier] // _PINNED_SHARE
            kept = kept | _alive(reversed(self._runs.values()), self._cuts, self._clock.now_s, most, self.pinned)
        for run in self._runs.values():
            if excess <= 0:
                break
            if run.tier is tier and run.key not in kept:
                excess -= run.size_bytes
                found.append(run)
        return found


def bytes_with(runs: SavedRuns, pin: Pin) -> int:
    """Return what all pinned prefixes take together with ``pin``, by estimate as far as they are not saved here."""
    sizes: dict[bytes, int] = {}
    for one in (*runs.pins, pin):
        holding = runs.holding(one.key)
        sizes |= {run.key: run.size_bytes for run in holding} or {one.key: runs.bytes_of(one.length)}
    return sum(sizes.values())


def _alive(
    runs: Iterable[KeptRun], cuts: Mapping[bytes, KeptRun], now_s: float, most: int, pinned: Mapping[bytes, int]
) -> set[bytes]:
    """Return the keys of the ``runs``, the last used first, whose lifetimes keep them: ``most`` bytes with the pinned.

    A run is kept if those before it are.
    """
    asked = [
        (run, Kept(run.lifetime.tenant, run.size_bytes))
        for run in runs
        if run.lifetime is not None and now_s < run.used_s + run.lifetime.seconds
    ]
    kept = set(pinned)
    for run in within_shares(asked, most - sum(pinned.values())):
        before = cuts.get(run.note.before)
        if not run.start or (before is not None and before.key in kept):
            kept.add(run.key)
    return kept

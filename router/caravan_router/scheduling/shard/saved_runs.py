"""Which cells a shard keeps outside its cache, in host memory and on disk, and which of them make way for others."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from caravan_proto.messages.commands import RunNote, RunSlice
from caravan_router.scheduling.events import SavedRun
from caravan_router.scheduling.pins import Pin, Pins
from caravan_router.scheduling.prefix_keys import BLOCK_TOKENS, PrefixKeys
from caravan_router.scheduling.shard.clock import Clock

# Pinned prefixes take at most the memory divided by this.
_PINNED_SHARE = 2


class Tier(Enum):
    """Where a run is."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(slots=True, eq=False)
class KeptRun:
    """The cells [start, end) of a prefix, named by the key of its end. ``cuts``: positions and keys of its cuts.

    ``used_s``: when it was saved or last loaded, in seconds on the scheduler's clock. Prefixes are found in it up to
    ``usable_end``: its end, unless it was dropped. ``loads``: how many sequences were loaded with it as their last run.
    """

    start: int
    cuts: tuple[tuple[int, bytes], ...]
    size_bytes: int
    tier: Tier
    note: RunNote
    used_s: float
    usable_end: int
    loads: int = 0

    @property
    def key(self) -> bytes:
        return self.cuts[-1][1]

    @property
    def end(self) -> int:
        return self.cuts[-1][0]


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
    pinned prefix are not given up for others.
    """

    def __init__(
        self,
        memory_bytes: int,
        disk_bytes: int,
        *,
        whole_only: bool,
        clock: Clock | None = None,
        pins: Pins | None = None,
    ) -> None:
        """``whole_only``: a run is a whole sequence and cannot be cut."""
        self._clock = clock or Clock()
        self.pins = pins or Pins()
        self.capacity_bytes = {Tier.MEMORY: memory_bytes, Tier.DISK: disk_bytes}
        self.whole_only = whole_only
        self.used_bytes = {Tier.MEMORY: 0, Tier.DISK: 0}
        # By key, least recently used first.
        self._runs: OrderedDict[bytes, KeptRun] = OrderedDict()
        # By the keys of their cuts.
        self._cuts: dict[bytes, KeptRun] = {}
        # Keys of runs that are kept only for the runs that begin inside them.
        self._dropped: set[bytes] = set()
        # The largest size of a cell seen, in bytes.
        self.cell_bytes = 0.0
        # The length and the size of the longest run seen.
        self._longest = (1, 0)

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
                self._dropped.remove(run.key)
                known.usable_end = known.end
                self._register(known)
            return
        if run.is_dropped:
            self._dropped.add(run.key)
        added = self._runs[run.key] = KeptRun(
            start=run.start,
            cuts=run.cuts,
            size_bytes=run.size_bytes,
            tier=Tier.DISK if run.on_disk else Tier.MEMORY,
            note=run.note,
            used_s=self._clock.now_s,
            usable_end=run.cuts[-1][0],
        )
        self.used_bytes[added.tier] += run.size_bytes
        self.cell_bytes = max(self.cell_bytes, run.size_bytes / (added.end - added.start))
        self._longest = max(self._longest, (added.end - added.start, added.size_bytes))
        self._register(added)

    def _register(self, run: KeptRun) -> None:
        for position, key in run.cuts:
            if position <= run.usable_end:
                self._cuts.setdefault(key, run)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the shard no longer has these runs."""
        for key in keys:
            run = self._runs.pop(key, None)
            if run is not None:
                self._dropped.discard(key)
                self.used_bytes[run.tier] -= run.size_bytes
                for _, cut in run.cuts:
                    if self._cuts.get(cut) is run:
                        del self._cuts[cut]

    # Questions

    def find(self, keys: PrefixKeys, known: int, most: int | None = None) -> SavedPrefix:
        """Return the longest saved prefix of ``known`` tokens, at most the first ``most`` of it."""
        most = known if most is None else most
        if self.whole_only:
            ends = sorted({run.end for run in self._runs.values() if run.end <= most}, reverse=True)
            return self._prefix(keys, next((end for end in ends if keys.at(end) in self._runs), 0), most)
        return self._prefix(keys, self._cut_length(keys, known), most)

    def _cut_length(self, keys: PrefixKeys, known: int) -> int:
        blocks = 0
        while (blocks + 1) * BLOCK_TOKENS <= known and keys.at((blocks + 1) * BLOCK_TOKENS) in self._cuts:
            blocks += 1
        length = blocks * BLOCK_TOKENS
        ends = range(min(length + BLOCK_TOKENS - 1, known), length, -1)
        return next((end for end in ends if keys.at(end) in self._cuts), length)

    def _prefix(self, keys: PrefixKeys, length: int, most: int) -> SavedPrefix:
        """Return the first ``most`` tokens of the prefix that ends with the cut at ``length``."""
        slices: list[RunSlice] = []
        end = length
        while end > 0:
            run = self._cuts.get(keys.at(end))
            if run is None:
                return NO_PREFIX  # the beginning of a run was given up before the run
            if run.start < most:
                slices.append(RunSlice(run.key, run.start, min(end, most)))
            end = run.start
        return SavedPrefix(min(length, most), tuple(reversed(slices)))

    def along(self, keys: PrefixKeys, known: int) -> list[KeptRun]:
        """Return the runs that end within the first ``known`` tokens of a sequence, the shortest first."""
        ends = sorted({run.end for run in self._runs.values() if run.end <= known})
        return [self._runs[key] for key in map(keys.at, ends) if key in self._runs]

    def has_beginning(self, keys: PrefixKeys, known: int) -> bool:
        """Whether anything is saved of ``known`` tokens, of which there is at least a block."""
        if self.whole_only:
            return self.find(keys, known).length > 0
        return known >= BLOCK_TOKENS and keys.at(BLOCK_TOKENS) in self._cuts

    @property
    def listed(self) -> list[KeptRun]:
        """The runs whose ends are prefixes that sequences can be found with, least recently used first."""
        return [run for key, run in self._runs.items() if key not in self._dropped]

    def holding(self, key: bytes) -> tuple[KeptRun, ...]:
        """Return the runs that hold the prefix that ``key`` names, in order; empty unless all of it is there."""
        found: list[KeptRun] = []
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

    def bytes_with(self, pin: Pin) -> int:
        """Return what all pinned prefixes take together with ``pin``, by estimate as far as they are not saved here."""
        sizes: dict[bytes, int] = {}
        for one in (*self.pins, pin):
            runs = self.holding(one.key)
            sizes |= {run.key: run.size_bytes for run in runs} or {one.key: self.bytes_of(one.length)}
        return sum(sizes.values())

    # Changes

    def use(self, prefix: SavedPrefix, *, loads: int = 0) -> None:
        """Note that ``prefix`` is wanted now, and that so many sequences are loaded from it."""
        for piece in reversed(prefix.slices):
            self._runs[piece.key].used_s = self._clock.now_s
            self._runs.move_to_end(piece.key)
        if loads:
            self._runs[prefix.slices[-1].key].loads += loads

    def drop(self, key: bytes, needed: Collection[bytes] = ()) -> list[bytes]:
        """Give up the run with this key. Return the keys of the runs that the shard is to forget.

        What others begin with stays: the runs that start at a cut of it, and those that will start at keys ``needed``.
        So do pinned prefixes that end in it.
        """
        if key in self._runs:
            self._dropped.add(key)
        return self.drop_unneeded(needed)

    def drop_unneeded(self, needed: Collection[bytes] = ()) -> list[bytes]:
        """Give up the dropped runs that no other begins with any more. See `drop`."""
        gone: list[bytes] = []
        while self._dropped:
            starts = {run.note.before for run in self._runs.values()} | {pin.key for pin in self.pins} | set(needed)
            for key in self._dropped:
                run = self._runs[key]
                run.usable_end = max((position for position, cut in run.cuts if cut in starts), default=0)
            found = [key for key in self._dropped if self._runs[key].usable_end == 0]
            self.forget(found)
            gone += found
            if not found:
                self._cuts.clear()
                for run in self._runs.values():
                    self._register(run)
                break
        return gone

    def bytes_of(self, cells: int) -> int:
        """Return the size of a run of ``cells`` cells, or more, as far as that is known."""
        if not self.whole_only:
            return int(cells * self.cell_bytes)
        # Most of it is recurrent state, whose size does not depend on the length.
        length, size = self._longest
        return size * max(cells, length) // length

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
        for run in self._runs.values():
            if excess <= 0:
                break
            if run.tier is tier and run.key not in kept:
                excess -= run.size_bytes
                found.append(run)
        return found

"""Which cells a shard keeps outside its cache, in host memory and on disk, and which of them make way for others."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from caravan_router.scheduling.actions import RunSlice
from caravan_router.scheduling.events import SavedRun
from caravan_router.scheduling.prefix_keys import BLOCK_TOKENS, PrefixKeys


class Tier(Enum):
    """Where a run is."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(slots=True, eq=False)
class _Run:
    """The cells [start, end) of a prefix, named by the key of its end. ``cuts``: positions and keys of its cuts."""

    start: int
    cuts: tuple[tuple[int, bytes], ...]
    size_bytes: int
    tier: Tier

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


NO_PREFIX = SavedPrefix()


@dataclass(frozen=True, slots=True)
class Eviction:
    """Keys of runs that are given up, and of runs that move from memory to disk."""

    dropped: tuple[bytes, ...] = ()
    spilled: tuple[bytes, ...] = ()


class SavedRuns:
    """The saved runs of one shard. The router decides what leaves memory and disk: what was used least recently.

    A run is used with the runs before it, and these count as used after it: they are given up last.
    """

    def __init__(self, memory_bytes: int, disk_bytes: int, *, whole_only: bool) -> None:
        """``whole_only``: a run is a whole sequence and cannot be cut."""
        self._capacity = {Tier.MEMORY: memory_bytes, Tier.DISK: disk_bytes}
        self.whole_only = whole_only
        self.used_bytes = {Tier.MEMORY: 0, Tier.DISK: 0}
        # By key, least recently used first.
        self._runs: OrderedDict[bytes, _Run] = OrderedDict()
        # By the keys of their cuts.
        self._cuts: dict[bytes, _Run] = {}
        # The largest size of a cell seen, in bytes.
        self.cell_bytes = 0.0

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, key: bytes) -> bool:
        return key in self._runs

    @property
    def is_on(self) -> bool:
        """Whether anything can be saved."""
        return self._capacity[Tier.MEMORY] > 0

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys of all runs, least recently used first."""
        return tuple(self._runs)

    def add(self, run: SavedRun) -> None:
        """Note a run that the shard has. One with a known key changes nothing."""
        if run.key in self._runs:
            return
        tier = Tier.DISK if run.on_disk else Tier.MEMORY
        added = self._runs[run.key] = _Run(run.start, run.cuts, run.size_bytes, tier)
        self.used_bytes[tier] += run.size_bytes
        self.cell_bytes = max(self.cell_bytes, run.size_bytes / (added.end - added.start))
        for _, key in run.cuts:
            self._cuts.setdefault(key, added)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the shard no longer has these runs."""
        for key in keys:
            run = self._runs.pop(key, None)
            if run is not None:
                self.used_bytes[run.tier] -= run.size_bytes
                for _, cut in run.cuts:
                    if self._cuts.get(cut) is run:
                        del self._cuts[cut]

    # Questions

    def find(self, keys: PrefixKeys, known: int, most: int | None = None) -> SavedPrefix:
        """Return the longest saved prefix of ``known`` tokens, at most the first ``most`` of it."""
        most = known if most is None else most
        if self.whole_only:
            return self._prefix(keys, self._whole_length(keys, most), most)
        return self._prefix(keys, self._cut_length(keys, known), most)

    def _cut_length(self, keys: PrefixKeys, known: int) -> int:
        blocks = 0
        while (blocks + 1) * BLOCK_TOKENS <= known and keys.at((blocks + 1) * BLOCK_TOKENS) in self._cuts:
            blocks += 1
        length = blocks * BLOCK_TOKENS
        ends = range(min(length + BLOCK_TOKENS - 1, known), length, -1)
        return next((end for end in ends if keys.at(end) in self._cuts), length)

    def _whole_length(self, keys: PrefixKeys, most: int) -> int:
        ends = sorted({run.end for run in self._runs.values() if run.end <= most}, reverse=True)
        return next((end for end in ends if keys.at(end) in self._runs), 0)

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

    def has_beginning(self, keys: PrefixKeys, known: int) -> bool:
        """Whether anything is saved of ``known`` tokens, of which there is at least a block."""
        return known >= BLOCK_TOKENS and keys.at(BLOCK_TOKENS) in self._cuts

    def describe(self, keys: Iterable[bytes]) -> list[SavedRun]:
        """Return the runs of these keys that there are, each after those that end where it starts."""
        found = sorted((self._runs[key] for key in keys if key in self._runs), key=lambda run: run.start)
        return [SavedRun(start=run.start, cuts=run.cuts, size_bytes=run.size_bytes) for run in found]

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
        return self._capacity[Tier.MEMORY] - self.used_bytes[Tier.MEMORY]

    # Changes

    def use(self, prefix: SavedPrefix) -> None:
        """Note that ``prefix`` is loaded now."""
        for piece in reversed(prefix.slices):
            self._runs.move_to_end(piece.key)

    def make_room(self, cells: int, keep: SavedPrefix = NO_PREFIX) -> Eviction:
        """Make room in memory for a run of so many cells, as far as its size is known."""
        return self.make_room_for(int(cells * self.cell_bytes), keep)

    def make_room_for(self, wanted: int, keep: SavedPrefix = NO_PREFIX) -> Eviction:
        """Make room in memory for so many bytes."""
        kept = {piece.key for piece in keep.slices}
        dropped: list[bytes] = []
        spilled: list[bytes] = []
        for run in self._beyond(Tier.MEMORY, wanted, kept):
            if 0 < run.size_bytes <= self._capacity[Tier.DISK]:
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

    def _beyond(self, tier: Tier, wanted: int, kept: set[bytes]) -> list[_Run]:
        """Return the runs that must leave ``tier`` so that ``wanted`` bytes are free there."""
        excess = self.used_bytes[tier] + wanted - self._capacity[tier]
        found: list[_Run] = []
        for run in self._runs.values():
            if excess <= 0:
                break
            if run.tier is tier and run.key not in kept:
                excess -= run.size_bytes
                found.append(run)
        return found

"""A saved run of a shard, as the router keeps account of it."""

from dataclasses import dataclass
from enum import Enum

from caravan_proto.messages.commands import RunNote


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

    @property
    def is_state(self) -> bool:
        return self.start == self.end

    @property
    def prefix_key(self) -> bytes:
        """The key of the prefix that it ends."""
        return self.note.before if self.is_state else self.key

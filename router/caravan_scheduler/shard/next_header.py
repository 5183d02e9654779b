"""What the next command of a shard does first."""

from caravan_proto.messages.commands import Header
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.stays import Stays


class NextHeader:
    """It releases what leaves, and also:

    ``recycled``: ids that were released and already given to others. ``parked``: lengths to which ended sequences are
    cut back, by id. ``dropped_runs``, ``spilled_runs``: keys of saved runs that are given up, or move to disk.

    ``sources``: sequences from which the next command copies: they must not be evicted before it is sent.
    ``is_urgent``: the shard should get a command at once: it computes for a client that is gone, or its cache is full.
    """

    def __init__(self, stays: Stays) -> None:
        self._stays = stays
        self.clear()

    def clear(self) -> None:
        """Begin with nothing to do, after a command was sent."""
        self.recycled: list[int] = []
        self.parked: dict[int, int] = {}
        self.dropped_runs: list[bytes] = []
        self.spilled_runs: list[bytes] = []
        self.sources: set[int] = set()
        self.is_urgent = False

    @property
    def evictable(self) -> list[Resident]:
        """The parked sequences that the next command does not copy, least recently used first."""
        return [one for sequence_id, one in self._stays.parked.items() if sequence_id not in self.sources]

    @property
    def is_needed(self) -> bool:
        """Whether the next command has something to do first."""
        return bool(self._stays.releasing or self.recycled or self.parked or self.dropped_runs or self.spilled_runs)

    @property
    def message(self) -> Header:
        """The header as the command carries it."""
        return Header(
            release=(*self.recycled, *self._stays.releasing),
            park=tuple(self.parked.items()),
            drop_runs=tuple(self.dropped_runs),
            spill_runs=tuple(self.spilled_runs),
        )

"""What the router knows of one shard, to read. `ShardLedger` changes it."""

from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.pins import Pins
from caravan_scheduler.shard.capacity import ShardCapacity
from caravan_scheduler.shard.cells import ShardCells
from caravan_scheduler.shard.checkpoints import Checkpoints
from caravan_scheduler.shard.claims import Claims
from caravan_scheduler.shard.clock import Clock
from caravan_scheduler.shard.command import ShardCommands
from caravan_scheduler.shard.costs import ShardCosts
from caravan_scheduler.shard.drain import Drain
from caravan_scheduler.shard.media import ShardMedia
from caravan_scheduler.shard.next_header import NextHeader
from caravan_scheduler.shard.saved_runs import SavedRuns
from caravan_scheduler.shard.saves import ShardSaves
from caravan_scheduler.shard.stays import Stays


class ShardAccount:
    """The parts of the account, each of which answers questions of its own.

    ``drain``: whether the shard drains. ``capacity``: what it has room for when it is empty. ``stays``: sequence ids.
    ``commands``: those under way. ``cells``: the cells that sequences hold. ``header``: what the next command does
    first. ``runs``: saved prefixes. ``saves``: what becomes one. ``checkpoints``: where prompts pause for that.
    ``costs``: how long steps and copies take.
    ``claims``: which streams may claim the target. ``media``: what is encoded.
    """

    def __init__(
        self,
        name: str,
        limits: ShardLimits,
        config: SchedulerConfig,
        clock: Clock | None = None,
        pins: Pins | None = None,
    ) -> None:
        self._clock = clock or Clock()
        # Whether the cells of ended sequences are kept for others.
        self._parks = config.prefix_caching
        self.name = name
        self.costs = ShardCosts()
        self.claims = Claims()
        self.drain = Drain()
        self.media = ShardMedia()
        self.capacity = ShardCapacity(limits, config)
        self.stays = Stays(limits.max_sequences, self.capacity.most_residents, self.drain)
        self.commands = ShardCommands(self.stays, self.costs)
        self.cells = ShardCells(self.capacity, self.stays, self.commands)
        self.header = NextHeader(self.stays)
        with_state = limits.layout.saving is Saving.WITH_STATE
        self.runs = SavedRuns(
            limits.memory_bytes, limits.disk_bytes, with_state=with_state, clock=self._clock, pins=pins
        )
        self.checkpoints = Checkpoints(limits.end_tokens, is_on=self._parks and with_state and limits.memory_bytes > 0)
        self.saves = ShardSaves(self.runs, self.capacity, self.commands, self.header)

    @property
    def layout(self) -> LayoutLimits:
        """What the cache holds in its current layout."""
        return self.capacity.limits.layout

"""What the router knows of one shard, to read: its cells, the media that it has encoded, and all the other parts.

`ShardLedger` changes it.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.config import Clock, SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.pins import Pins
from caravan_scheduler.prefix_tree import NO_MATCH, Match, PrefixTree
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.capacity import ShardCapacity
from caravan_scheduler.shard.checkpoints import Checkpoints
from caravan_scheduler.shard.command import NextHeader, ShardCommands
from caravan_scheduler.shard.costs import ShardCosts
from caravan_scheduler.shard.policy import NOTHING_HELD, Held, JobPolicy
from caravan_scheduler.shard.resident import Resident, Status
from caravan_scheduler.shard.saved_runs import SavedRuns
from caravan_scheduler.shard.saves import ShardSaves
from caravan_scheduler.shard.stays import Drain, Stays

# Seconds of a cell before any was measured.
_FIRST_ENCODED_CELL_S = 1e-3
_NEWEST_ENCODING = 0.3
# Media that are remembered. A shard drops what was used least recently by its own limit, and says so when it is asked.
_MOST_ENCODED = 4096


class Claims:
    """A stream gives way to the prompts that could be computed when its own was complete.

    They came with it, and only the order of the queue put it first. It claims the target once so many more are
    complete, or fewer are left than that. One that had streamed before it was seen here claims it at once. Longer
    prompts that started before it do not count: they are what it did not wait for.
    """

    def __init__(self) -> None:
        self._prompts_done = 0
        # How many prompts are complete when each of the streams that were seen last claims the target.
        self._from: dict[Resident, int] = {}

    def note_prompt(self) -> None:
        """Note that a prompt is complete."""
        self._prompts_done += 1

    def any_of(self, decoding: list[Resident], prompts: int, overtaken: Callable[[Resident], int]) -> bool:
        """Whether any of ``decoding`` claims the target, while ``prompts`` have yet to be computed.

        ``overtaken``: returns how many of these started before a stream.
        """
        done, known = self._prompts_done, self._from
        latest = done + prompts
        self._from = {}
        for resident in decoding:
            if (claimed := known.get(resident)) is None:
                claimed = done if len(resident.sequence.output) > 1 else latest - overtaken(resident)
            self._from[resident] = min(claimed, latest)
        return any(claimed <= done for claimed in self._from.values())


class ShardMedia:
    """A shard says what it lacks, so what is noted here may be wrong. ``cell_s``: seconds to encode a cell."""

    def __init__(self) -> None:
        # By id, least recently used first.
        self._encoded: OrderedDict[bytes, None] = OrderedDict()
        self.cell_s = _FIRST_ENCODED_CELL_S

    def missing(self, spans: Iterable[MediaSpan]) -> Mapping[bytes, int]:
        """Return which media of ``spans`` are not encoded, each with the cells that it has there."""
        cells: dict[bytes, int] = {}
        for span in spans:
            if span.media_id not in self._encoded:
                cells[span.media_id] = cells.get(span.media_id, 0) + span.count
        return cells

    def encode_s(self, spans: Iterable[MediaSpan]) -> float:
        """Return how long it takes to encode what is missing of ``spans``, in seconds."""
        return self.cell_s * sum(self.missing(spans).values())

    # Changes, which the scheduler makes

    def note(self, media_id: bytes, cells: int, seconds: float) -> None:
        """Note that a medium is encoded, which has taken ``seconds``; 0 if it was before."""
        self._encoded[media_id] = None
        self._encoded.move_to_end(media_id)
        if len(self._encoded) > _MOST_ENCODED:
            self._encoded.popitem(last=False)
        if seconds > 0:
            self.cell_s += _NEWEST_ENCODING * (seconds / cells - self.cell_s)

    def forget(self, media_ids: Collection[bytes]) -> None:
        """Note that the shard has dropped these media."""
        for media_id in media_ids:
            self._encoded.pop(media_id, None)


class ShardCells:
    """Cells are counted, not named: ``tree`` knows which sequences share a run of them.

    The tree learns of outputs when somebody asks for what might begin with them, or when they end, so that no step has
    to tell it. Until then they are in the *tails* of residents and leaving sequences: ``tails`` counts them, and the
    ledger adds what is computed or loaded.
    """

    def __init__(self, capacity: ShardCapacity, stays: Stays, commands: ShardCommands) -> None:
        self._capacity = capacity
        self._stays = stays
        self._commands = commands
        self.tree = PrefixTree()
        self.tails = 0

    @property
    def live(self) -> int:
        """Cells of sequences that are not parked."""
        if self._capacity.limits.layout.shares_cells:
            return self.tree.live_cells + self.tails
        return sum(one.computed for one in (*self._stays.residents.values(), *self._stays.leaving.values()))

    @property
    def held(self) -> int:
        """Cells that hold tokens, including those of parked sequences."""
        if self._capacity.limits.layout.shares_cells:
            return self.tree.cells + self.tails
        return self.live + sum(self.tree.length(sequence_id) for sequence_id in self._stays.parked)

    @property
    def promised(self) -> int:
        """Cells that started prompts and commands under way will take."""
        prompts = sum([one.target - one.computed for one in self._stays.incomplete.values()])
        groups = self._stays.beam_groups
        beams = sum(group.cells_to_branch for group in groups) if groups else 0
        return prompts + beams + sum([command.coming_cells for command in self._commands.in_flight])

    @property
    def available(self) -> int:
        """Cells that could be had now if all parked sequences were evicted."""
        return self._capacity.cells - self.live - self.promised

    @property
    def free(self) -> int:
        """Cells that could be had now without evicting anything. Releases count: the next command does them first."""
        return self._capacity.cells - self.held - self.promised

    def tail(self, resident: Resident) -> int:
        """Cells of ``resident`` that the tree does not know."""
        return resident.computed - self.tree.length(resident.sequence_id)

    def index(self, resident: Resident) -> bool:
        """Enter what ``resident`` has computed into the tree. Return whether that is more than the tree knew."""
        tail = self.tail(resident)
        if tail:
            known = resident.computed - tail
            self.tails -= tail
            self.tree.extend(resident.sequence_id, resident.sequence.tokens(known, resident.computed))
        return tail > 0

    # Changes, which the ledger makes

    def forget(self, resident: Resident) -> None:
        """Count the cells of ``resident`` no more."""
        self.tails -= self.tail(resident)
        self.tree.remove(resident.sequence_id)

    def rebuild(self, *, shares_beginnings: bool) -> None:
        """Enter every sequence anew. ``shares_beginnings``: the shard lets it share those of others with lower ids."""
        held = (*self._stays.residents.values(), *self._stays.parked.values())
        self.tree = PrefixTree()
        self.tails = 0
        for resident in sorted(held, key=lambda one: one.sequence_id):
            found = self._equal_beginning(resident) if shares_beginnings else NO_MATCH
            if found.length:
                self.tree.fork(resident.sequence_id, found.sources[0], found.length)
            else:
                self.tree.insert(resident.sequence_id, resident.sequence.request.prefix_namespace)
            resident.shared = found.length
            self.tails += self.tail(resident)
            if resident.status is not Status.LOADED:
                self.index(resident)
            if resident.status is Status.PARKED:
                self.tree.park(resident.sequence_id)

    def _equal_beginning(self, resident: Resident) -> Match:
        """Return the cells in the tree that a sequence which was moved begins with. The shard finds at least these."""
        layout, sequence = self._capacity.limits.layout, resident.sequence
        if not layout.shares_cells or layout.whole_only or layout.saving is not Saving.ANY:
            return NO_MATCH
        most, media = resident.computed - 1, sequence.spec.media
        if media is not None:
            most = min(most, media.spans[0].offset)
        if resident.status is Status.LOADED or most <= 0:
            return NO_MATCH
        return self.tree.match(sequence.request.prefix_namespace, sequence.tokens(0, most), most)


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
        policy: JobPolicy | None = None,
    ) -> None:
        """``policy``: decides which parked sequences make way; None: those that were used least recently."""
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
        self.policy = policy
        self.header = NextHeader(self.stays, self._in_order_of_eviction)
        with_state = limits.layout.saving is Saving.WITH_STATE
        self.runs = SavedRuns(
            limits.memory_bytes, limits.disk_bytes, with_state=with_state, clock=self._clock, pins=pins
        )
        self.checkpoints = Checkpoints(limits.end_tokens, is_on=self._parks and with_state and limits.memory_bytes > 0)
        self.saves = ShardSaves(self.runs, self.capacity, self.commands, self.header)

    def _in_order_of_eviction(self, parked: list[Resident]) -> list[Resident]:
        return parked if self.policy is None else self.policy.in_order_of_eviction(self, parked)

    def held_against(self, sequence: Sequence) -> Held:
        """Return what ``sequence`` may not take, since it is kept for others."""
        return NOTHING_HELD if self.policy is None or not self.stays.parked else self.policy.held(self, sequence)

    @property
    def expects_return(self) -> bool:
        """Whether a request is expected that continues a parked sequence, and should not wait for a long step."""
        return any(self.is_expected(resident) for resident in self.stays.parked.values())

    def is_expected(self, resident: Resident) -> bool:
        """Whether a request is expected that continues ``resident``, which is parked."""
        return self.policy is not None and self.policy.is_expected(resident)

    @property
    def layout(self) -> LayoutLimits:
        """What the cache holds in its current layout."""
        return self.capacity.limits.layout

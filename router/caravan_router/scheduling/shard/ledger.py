"""What the router knows of one shard: who holds which sequence ids and cells, and which commands are under way."""

import heapq
from collections.abc import Collection
from typing import TYPE_CHECKING

from caravan_router.scheduling.actions import Header
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import ShardLimits
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.adapter_turn import AdapterTurn
from caravan_router.scheduling.shard.prefix_tree import NO_MATCH, Match, PrefixTree
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.shard.step_cost import StepCost
from caravan_router.scheduling.shard.swap_cost import SwapCost

if TYPE_CHECKING:
    from caravan_router.scheduling.shard.command import InFlight


class ShardState:
    """The accounting of one shard.

    Each sequence id is in exactly one of: free, resident, leaving (being swapped out), parked (ended, its cells kept
    for others to start from), releasing (given up here, still held by the shard until the next command).
    """

    def __init__(self, name: str, limits: ShardLimits, config: SchedulerConfig) -> None:
        self.name = name
        self.limits = limits
        self.capacity = min(limits.cells, config.max_batch_total_tokens or limits.cells)
        self._parks = config.prefix_caching
        self._max_residents = config.max_batch_size or limits.max_sequences
        self.residents: dict[int, Resident] = {}
        self.leaving: dict[int, Resident] = {}
        # Least recently used first.
        self.parked: dict[int, None] = {}
        self.releasing: dict[int, Resident | None] = {}
        self.free_ids = list(range(limits.max_sequences))
        self.tree = PrefixTree()
        # Computed tokens of residents that are not in the tree: it learns of outputs when they are complete.
        self._tails = 0
        self.in_flight: list[InFlight] = []
        # The shard should hear at once: somebody's client is gone.
        self.release_now = False
        self.draining = False
        self.steps_since_prefill = 0
        self.turn = AdapterTurn()
        self.mixed_cost = StepCost()
        self.idle_cost = StepCost()
        self.swap_cost = SwapCost()
        # For the header of the next command: ids given up and already handed out again, parks, swapped ones to forget.
        self._recycled: list[int] = []
        self._parking: dict[int, int] = {}
        self.drop_handles: list[int] = []

    @property
    def can_command(self) -> bool:
        """Nothing is under way, or a lone Decode, which yields to the next command."""
        return not self.in_flight or (len(self.in_flight) == 1 and self.in_flight[0].is_decode)

    @property
    def completes_prefill(self) -> bool:
        """A Prefill is under way after which no prompt is left to compute."""
        if not self.in_flight or not self.in_flight[-1].chunk_tokens:
            return False
        under_way = self.in_flight[-1].chunk_tokens
        return all(
            resident.computed + under_way.get(resident.sequence_id, 0) >= resident.target
            for resident in self.prefilling
        )

    # Cells

    @property
    def live_cells(self) -> int:
        """Cells of sequences that run."""
        if self.limits.shares_cells:
            return self.tree.live_cells + self._tails
        return sum(r.computed for r in (*self.residents.values(), *self.leaving.values()))

    @property
    def held_cells(self) -> int:
        """Cells that hold tokens, those of parked sequences too."""
        if self.limits.shares_cells:
            return self.tree.cells + self._tails
        return self.live_cells + sum(self.tree.length(sequence_id) for sequence_id in self.parked)

    @property
    def promised_cells(self) -> int:
        """Cells that prompts begun here, and passes under way, will take."""
        prompts = sum(r.target - r.computed for r in self.residents.values() if r.prefilling)
        return prompts + sum(command.coming_cells for command in self.in_flight)

    @property
    def available_cells(self) -> int:
        """Cells that could be had now, if all parked sequences were evicted."""
        return self.capacity - self.live_cells - self.promised_cells

    @property
    def free_cells(self) -> int:
        """Cells that could be had now without evicting anything. Releases count: the next command does them first."""
        return self.capacity - self.held_cells - self.promised_cells

    # Sequences

    @property
    def is_bounded_by_sequence(self) -> bool:
        """Each sequence has cells of its own: there is nothing to share out."""
        return not self.limits.shares_cells and self.capacity == self.limits.cells

    @property
    def prefilling(self) -> list[Resident]:
        """Residents whose prompt is not complete: higher priority first, then in the order they came."""
        found = [resident for resident in self.residents.values() if resident.prefilling]
        return sorted(found, key=lambda resident: -resident.priority)

    @property
    def adapters(self) -> set[str]:
        """Those of its residents."""
        return {resident.adapter for resident in self.residents.values()}

    @property
    def decoding(self) -> list[Resident]:
        """Residents that take one token per pass."""
        return [resident for resident in self.residents.values() if not resident.prefilling]

    @property
    def free_sequences(self) -> int:
        """Sequences that could begin with the next command, if all parked ones were evicted."""
        ids = len(self.free_ids) + len(self.releasing) + len(self.parked)
        return 0 if self.draining else min(ids, self._max_residents - len(self.residents))

    def could_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the empty shard has room for it."""
        peak = sequence.request.peak_cells
        return peak <= self.limits.cells_per_sequence and peak <= self.capacity

    def match(self, sequence: Sequence) -> Match:
        """What is there of its prompt and output so far; the last token is always computed. Sources can be copied."""
        if sequence.needs_prompt_logprobs:
            return NO_MATCH
        tokens = sequence.tokens(0, sequence.known_tokens)
        namespace, most = sequence.request.prefix_namespace, len(tokens) - 1
        find = self.tree.match_whole if self.limits.whole_only else self.tree.match
        found = find(namespace, tokens, most)
        sources = tuple(key for key in found.sources if key in self.parked or self._is_begun(key))
        return Match(found.length, found.live_length, sources) if sources else NO_MATCH

    def _is_begun(self, sequence_id: int) -> bool:
        resident = self.residents.get(sequence_id)
        return resident is not None and resident.begun

    def acquire_id(self, keep: Collection[int]) -> int:
        """A sequence id for the next command: free, or of the least recently used parked sequence not in ``keep``."""
        if not self.free_ids:
            if not self.releasing:
                self.evict(next(sequence_id for sequence_id in self.parked if sequence_id not in keep))
            self._recycle_ids()
        return heapq.heappop(self.free_ids)  # the lowest: split caches batch neighbouring ids together

    def evict(self, sequence_id: int) -> None:
        """Give up what a parked sequence holds."""
        del self.parked[sequence_id]
        self._parking.pop(sequence_id, None)
        self.tree.remove(sequence_id)
        self.releasing[sequence_id] = None

    def make_free(self, cells: int, keep: Collection[int] = ()) -> None:
        """Evict parked sequences, least recently used first, until so many cells are free or none is left."""
        if self.free_cells >= cells:
            return
        for sequence_id in [sequence_id for sequence_id in self.parked if sequence_id not in keep]:
            self.evict(sequence_id)
            if self.free_cells >= cells:
                return

    def touch(self, sequence_id: int) -> None:
        """A parked sequence was of use: it is the last to be evicted."""
        if sequence_id in self.parked:
            del self.parked[sequence_id]
            self.parked[sequence_id] = None

    def take_over(self, sequence_id: int, length: int) -> None:
        """A parked sequence becomes the beginning of a new one."""
        del self.parked[sequence_id]
        self.tree.revive(sequence_id, length)

    def advance(self, resident: Resident, tokens: int) -> None:
        """A chunk of its prompt is computed."""
        resident.begun = True
        resident.computed += tokens
        if resident.live:
            self._tails += tokens
            self.index(resident)

    def restore(self, resident: Resident, length: int) -> None:
        """It comes back from the swap space with ``length`` tokens in all."""
        self._tails += length - resident.computed
        resident.computed = length
        self.index(resident)

    def grow(self, resident: Resident) -> None:
        """It decoded a token: the one before is in a cell now."""
        resident.computed += 1
        self._tails += 1

    def index(self, resident: Resident) -> None:
        """Enter what it has computed into the tree."""
        self.tree.extend(resident.sequence_id, resident.sequence.tokens(resident.indexed, resident.computed))
        self._tails -= resident.computed - resident.indexed
        resident.indexed = resident.computed

    def finish(self, resident: Resident) -> None:
        """It ended by itself: park what it computed."""
        resident.live = False
        if resident.sequence_id in self.leaving:
            return  # its swap is under way, and ends with nothing saved
        if self._parks and resident.computed:
            self._park(resident)
        else:
            self.remove(resident)

    def cancel(self, resident: Resident) -> None:
        """Nobody waits for it any more: stop it at once, and park what is worth it."""
        resident.live = False
        if resident.sequence_id in self.leaving:
            return
        whole = not self.limits.whole_only  # while it runs, nobody knows how far it is
        if self._parks and whole and resident.begun and not resident.prefilling:
            self._park(resident)
            self._parking[resident.sequence_id] = resident.computed
        else:
            self.remove(resident)
        self.release_now = True

    def _park(self, resident: Resident) -> None:
        del self.residents[resident.sequence_id]
        self.index(resident)
        self.tree.park(resident.sequence_id)
        self.parked[resident.sequence_id] = None

    def remove(self, resident: Resident) -> None:
        """End its stay and give up what it holds: the shard is told with the next command, if it has heard of it."""
        sequence_id = resident.sequence_id
        assert self.residents.get(sequence_id) is resident, f"{sequence_id} is not resident"
        resident.live = False
        del self.residents[sequence_id]
        self._forget_cells(resident)
        if resident.begun or resident.takes_over or any(command.starts(resident) for command in self.in_flight):
            self.releasing[sequence_id] = resident
        else:
            heapq.heappush(self.free_ids, sequence_id)

    def _forget_cells(self, resident: Resident) -> None:
        self._tails -= resident.computed - resident.indexed
        self.tree.remove(resident.sequence_id)

    def never_began(self, resident: Resident) -> None:
        """The shard could not start it: unless it took over another's place, its id was never in use."""
        sequence_id = resident.sequence_id
        if self.residents.get(sequence_id) is resident:
            self.remove(resident)
        if self.releasing.get(sequence_id) is resident and not resident.takes_over:
            del self.releasing[sequence_id]
            heapq.heappush(self.free_ids, sequence_id)

    def leave(self, resident: Resident) -> None:
        """It is about to be swapped out."""
        del self.residents[resident.sequence_id]
        self.leaving[resident.sequence_id] = resident

    def left(self, resident: Resident) -> None:
        """It was swapped out, or what it held was given up: its id is free."""
        del self.leaving[resident.sequence_id]
        self._forget_cells(resident)
        heapq.heappush(self.free_ids, resident.sequence_id)

    # The next command

    def take_header(self) -> Header:
        """What the next command does first; the ids it releases are free for the commands after."""
        self._recycle_ids()
        header = Header(
            release=tuple(self._recycled), park=tuple(self._parking.items()), drop_handles=tuple(self.drop_handles)
        )
        self._recycled, self._parking, self.drop_handles = [], {}, []
        self.release_now = False
        return header

    @property
    def has_header(self) -> bool:
        """Whether the next command has something to do first."""
        return bool(self.releasing or self._recycled or self._parking or self.drop_handles)

    def _recycle_ids(self) -> None:
        for sequence_id in self.releasing:
            heapq.heappush(self.free_ids, sequence_id)
            self._recycled.append(sequence_id)
        self.releasing.clear()

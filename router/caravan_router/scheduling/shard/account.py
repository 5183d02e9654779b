"""What the router knows of one shard, to read: sequence ids, cells, commands under way. `ShardLedger` changes it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from caravan_router.core.prefixes import CachedPrefix, ShardPrefixes
from caravan_router.scheduling.actions import Header
from caravan_router.scheduling.beams import BeamGroup
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import LayoutLimits, Saving, ShardLimits
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.adapter_turn import AdapterTurn
from caravan_router.scheduling.shard.beam_places import BeamPlaces
from caravan_router.scheduling.shard.command import InFlight
from caravan_router.scheduling.shard.costs import ShardCosts
from caravan_router.scheduling.shard.prefix_tree import NO_MATCH, Match, PrefixTree
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.shard.saved_runs import NO_PREFIX, SavedPrefix, SavedRuns, Tier

# What a Load costs beside the copy, in seconds: a command of its own.
LOAD_S = 0.002
# Cells that a sequence should be able to take after it starts. With fewer, the layout might have to change at once.
_GROWTH_CELLS = 8


def fits_for_now(sequence: Sequence, layout: LayoutLimits) -> bool:
    """Whether ``sequence`` fits ``layout`` until it has grown by some tokens, or has ended."""
    return min(sequence.known_tokens + _GROWTH_CELLS, sequence.request.peak_cells) <= layout.cells_per_sequence


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """Sequences can start from the prefixes of these ``landmarks`` on one more sequence of a shard, or on one fewer."""

    landmarks: tuple[int, ...]
    is_new: bool


class ShardAccount:
    """Every sequence id is free or belongs to the one `Resident` whose status says what the shard does with it.

    Cells are counted, not named: ``tree`` knows which sequences share a run of them.
    """

    def __init__(self, name: str, limits: ShardLimits, config: SchedulerConfig) -> None:
        self.name = name
        self.limits = limits
        self._most_cells = config.max_batch_total_tokens
        self.tree = PrefixTree()
        whole_only = limits.layout.saving is Saving.WHOLE_ONLY
        self.runs = SavedRuns(limits.memory_bytes, limits.disk_bytes, whole_only=whole_only)
        self.turn = AdapterTurn()
        self.costs = ShardCosts()
        self.steps_since_prefill = 0
        self.draining = False
        # While it drains: since when, in seconds on the scheduler's clock, whether what it keeps of ended sequences has
        # been offered to others, and whether it may end.
        self.draining_since_s = math.inf
        self.has_moved_prefixes = False
        self.is_drained = False
        # When the layout was changed last, in seconds on the scheduler's clock.
        self.layout_set_s = -math.inf
        # The shard should get a command at once: it computes for a client that is gone, or its cache is full.
        self.release_now = False
        self._max_residents = config.max_batch_size or limits.max_sequences
        self._free_ids = list(range(limits.max_sequences))
        self._residents: dict[int, Resident] = {}
        self._leaving: dict[int, Resident] = {}
        self._parked: dict[int, Resident] = {}
        self._releasing: dict[int, Resident] = {}
        self._in_flight: list[InFlight] = []
        self._beams = BeamPlaces()
        # Whether the last step was of beam searches: they take turns with all others.
        self.evaluated_last = False
        # Cells of residents and leaving sequences that the tree does not know: it learns of outputs when they end.
        self._tail_cells = 0
        # Counts the changes of the status of residents.
        self._moves = 0
        # When the command under way is expected to end, unless it is a Decode; on the scheduler's clock.
        self.busy_until_s = -math.inf
        # Changes of the prefixes that sequences can start from, which nobody has taken.
        self._prefix_changes: list[PrefixChange] = []
        # Sequences from which the next command copies: they must not be evicted before it is sent.
        self._sources: set[int] = set()
        # For the header of the next command: ids released and already given to others, lengths to park, keys of runs.
        self._recycled: list[int] = []
        self._parking: dict[int, int] = {}
        self._dropped_runs: list[bytes] = []
        self._spilled_runs: list[bytes] = []

    @property
    def layout(self) -> LayoutLimits:
        """What the cache holds in its current layout."""
        return self.limits.layout

    @property
    def capacity(self) -> int:
        """Cells of all sequences together."""
        return min(self.layout.cells, self._most_cells or self.layout.cells)

    # Sequences

    @property
    def residents(self) -> Mapping[int, Resident]:
        """Sequences that start or run, by id, in the order in which they were placed."""
        return self._residents

    @property
    def leaving(self) -> Mapping[int, Resident]:
        """Sequences whose Save under way releases them, by id."""
        return self._leaving

    @property
    def parked(self) -> Mapping[int, Resident]:
        """Ended sequences whose cells are kept, by id, least recently used first."""
        return self._parked

    @property
    def releasing(self) -> Mapping[int, Resident]:
        """Sequences that the next command releases, by id."""
        return self._releasing

    @property
    def free_ids(self) -> Collection[int]:
        """Sequence ids that nobody holds."""
        return self._free_ids

    @property
    def beam_groups(self) -> Mapping[BeamGroup, Mapping[int, Resident]]:
        """The residents of each beam search, by their index."""
        return self._beams.groups

    @property
    def prefilling(self) -> list[Resident]:
        """Residents whose prompt is not complete, by descending priority, then in the order of `residents`.

        Beams are left out.
        """
        found = [one for one in self._residents.values() if one.computed < one.target and not one.is_beam]
        return sorted(found, key=lambda resident: -resident.priority) if len(found) > 1 else found

    @property
    def decoding(self) -> list[Resident]:
        """Residents that take one token per step, without beams."""
        return [one for one in self._residents.values() if one.computed >= one.target and not one.is_beam]

    @property
    def positions_under_way(self) -> dict[int, range]:
        """The positions of each sequence that the current step may be computing, by sequence id."""
        step = next((command for command in self._in_flight if command.steps_left), None)
        if step is None:
            return {}
        return {
            sequence_id: range(resident.computed, resident.computed + step.unseen_tokens(resident))
            for sequence_id, resident in step.residents.items()
            if resident is self._residents.get(sequence_id)
        }

    @property
    def is_empty(self) -> bool:
        """Whether it drains, and no sequence is left on it, nor a command under way, nor something to save."""
        is_quiet = not (self._residents or self._leaving or self._in_flight)
        return (
            self.draining
            and is_quiet
            and not (self.can_save and any(not r.is_expendable for r in self._parked.values()))
        )

    @property
    def adapters(self) -> set[str]:
        """The adapters of its residents."""
        return {one.sequence.request.spec.adapter for one in self._residents.values()}

    @property
    def free_sequences(self) -> int:
        """How many sequences could start with the next command if all parked ones were evicted."""
        ids = len(self._free_ids) + len(self._releasing) + len(self._parked)
        return 0 if self.draining else min(ids, self._max_residents - len(self._residents)) - self._beams.reserved_ids

    def has_id_for(self, match: Match) -> bool:
        """Whether a sequence that starts from ``match`` can get an id without evicting what the next command copies."""
        if self.free_sequences <= 0:
            return False
        if self._free_ids or self._releasing:
            return True
        kept = self._sources | set(match.sources[:1])
        return any(sequence_id not in kept for sequence_id in self._parked)

    def could_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the empty shard has room for ``sequence``, in one of its layouts."""
        peak = sequence.request.peak_cells
        if (group := sequence.group) is not None:
            return peak <= self.limits.most_cells_per_sequence and self._could_ever_hold_beams(group)
        return peak <= self.limits.most_cells_per_sequence and peak <= self.capacity

    def _could_ever_hold_beams(self, group: BeamGroup) -> bool:
        if group.width > min(self.limits.max_sequences, self._max_residents, self.limits.max_batch_tokens):
            return False
        prompt_copies = 1 if self.layout.shares_cells and not self.layout.whole_only else group.width
        return prompt_copies * len(group.leader.spec.prompt) + group.most_output_cells <= self.capacity

    def could_hold_now(self, sequence: Sequence) -> bool:
        """Whether the empty shard has room for ``sequence`` in its current layout, for now."""
        return self.could_ever_hold(sequence) and fits_for_now(sequence, self.layout)

    def could_outgrow(self, resident: Resident) -> bool:
        """Whether ``resident`` may get longer than the current layout allows."""
        return resident.sequence.request.peak_cells > self.layout.cells_per_sequence

    def match(self, sequence: Sequence) -> Match:
        """Find the longest prefix of ``sequence`` that can be copied. Its last token is always computed.

        While it waits, it is looked for once per change of what the shard holds.
        """
        tree = self.tree
        version = tree.version + self._moves  # grows with each change of either
        known = sequence.matches.get(self.name)
        if known is not None and known[0] is tree and known[1] == version:
            return known[2]
        found = self._find_match(sequence)
        sequence.matches[self.name] = (tree, version, found)
        return found

    def _find_match(self, sequence: Sequence) -> Match:
        tokens = sequence.tokens(0, sequence.known_tokens)
        if self.layout.whole_only:
            most = min(len(tokens) - 1, sequence.most_with_logprobs)
            found = self.tree.match_whole(sequence.request.prefix_namespace, tokens, most)
        else:
            found = self.tree.match(sequence.request.prefix_namespace, tokens, sequence.most_cached)
        sources = tuple(sequence_id for sequence_id in found.sources if self._can_be_copied(sequence_id))
        return Match(found.length, found.live_length, sources) if sources else NO_MATCH

    @property
    def can_save(self) -> bool:
        """Whether cells of sequences can be saved."""
        return self.runs.is_on and self.layout.saving is not Saving.NOTHING

    def saved_prefix(self, sequence: Sequence, cached: int) -> SavedPrefix:
        """Find the longest saved prefix of ``sequence`` if loading it is faster than computing from ``cached`` on."""
        if not self.can_save:
            return NO_PREFIX
        found = self.runs.find(sequence.keys, sequence.known_tokens, sequence.most_cached)
        load_s = LOAD_S + found.length * self.costs.copy_cell_s
        compute_s = (found.length - cached) * self.costs.recompute_token_s
        return found if load_s < compute_s else NO_PREFIX

    def _can_be_copied(self, sequence_id: int) -> bool:
        resident = self._residents.get(sequence_id)
        return sequence_id in self._parked or (resident is not None and resident.is_running)

    # Cells

    @property
    def is_bounded_by_sequence(self) -> bool:
        """Whether each sequence has cells of its own, so that there is nothing to share out."""
        return not self.layout.shares_cells and self.capacity == self.layout.cells

    @property
    def live_cells(self) -> int:
        """Cells of sequences that are not parked."""
        if self.layout.shares_cells:
            return self.tree.live_cells + self._tail_cells
        return sum(resident.computed for resident in (*self._residents.values(), *self._leaving.values()))

    def tail_cells(self, resident: Resident) -> int:
        """Cells of ``resident`` that the tree does not know."""
        return resident.computed - self.tree.length(resident.sequence_id)

    @property
    def held_cells(self) -> int:
        """Cells that hold tokens, including those of parked sequences."""
        if self.layout.shares_cells:
            return self.live_cells + self.tree.cells - self.tree.live_cells
        return self.live_cells + sum(self.tree.length(sequence_id) for sequence_id in self._parked)

    @property
    def promised_cells(self) -> int:
        """Cells that started prompts and commands under way will take."""
        prompts = sum(r.target - r.computed for r in self._residents.values() if r.computed < r.target)
        groups = self._beams.groups
        beams = sum(group.cells_to_branch for group in groups) if groups else 0
        return prompts + beams + sum(command.coming_cells for command in self._in_flight)

    @property
    def available_cells(self) -> int:
        """Cells that could be had now if all parked sequences were evicted."""
        return self.capacity - self.live_cells - self.promised_cells

    @property
    def free_cells(self) -> int:
        """Cells that could be had now without evicting anything. Releases count: the next command does them first."""
        return self.capacity - self.held_cells - self.promised_cells

    @property
    def prefixes(self) -> ShardPrefixes:
        """What parked sequences hold, and what is saved."""
        shares_cells = self.layout.shares_cells
        return ShardPrefixes(
            shard=self.name,
            cells=self.held_cells - self.live_cells,
            memory_bytes=self.runs.used_bytes[Tier.MEMORY],
            disk_bytes=self.runs.used_bytes[Tier.DISK],
            prefixes=tuple(
                CachedPrefix(
                    tokens=self.tree.length(sequence_id),
                    cells=self.tree.own_cells(sequence_id) if shares_cells else self.tree.length(sequence_id),
                    tenant=resident.sequence.spec.tenant.name,
                    adapter=resident.adapter,
                    last_used_s=resident.last_used_s,
                )
                for sequence_id, resident in self._parked.items()
            ),
        )

    # Commands

    @property
    def in_flight(self) -> tuple[InFlight, ...]:
        """Commands that were sent and have not ended: at most a Decode and its successor."""
        return tuple(self._in_flight)

    @property
    def can_command(self) -> bool:
        """Whether nothing is under way, or a lone Decode, which yields to the next command."""
        return not self._in_flight or (len(self._in_flight) == 1 and self._in_flight[0].is_decode)

    @property
    def completes_prefill(self) -> bool:
        """Whether a Prefill is under way after which no prompt is left to compute."""
        return bool(self._in_flight) and self._in_flight[-1].completes_prefill(self.prefilling)

    @property
    def has_header(self) -> bool:
        """Whether the next command has something to do first."""
        return bool(self._releasing or self._recycled or self._parking or self._dropped_runs or self._spilled_runs)

    @property
    def next_header(self) -> Header:
        """What the next command does first."""
        return Header(
            release=(*self._recycled, *self._releasing),
            park=tuple(self._parking.items()),
            drop_runs=tuple(self._dropped_runs),
            spill_runs=tuple(self._spilled_runs),
        )

    def find_command(self, command_id: int) -> InFlight | None:
        """Return the command under way with this id, if there is one."""
        return next((one for one in self._in_flight if one.command.command_id == command_id), None)

"""The saved runs of a shard of the simulation."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from caravan_proto.messages.commands import Chunk, Load, LoadEntry, PrefixCopy, Row, Save, SequenceParameters
from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_proto.messages.results import Loaded, Saved
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.prompt_media import is_cell
from caravan_scheduler.core.tokens import common_length
from caravan_scheduler.events import SavedRun, ShardLimits
from caravan_testing.model_media import is_border, is_whole, tokens_of


@dataclass
class Held:
    """A sequence on a shard."""

    setup: SequenceParameters
    tokens: list[int] = field(default_factory=list)
    # A number for each cell; sequences that share a prefix have the same numbers.
    cells: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def pending(self) -> bool:
        """Whether the last token is sampled and not yet in a cell."""
        return len(self.tokens) > len(self.cells)

    def cut(self, length: int) -> None:
        assert 1 <= length <= len(self.cells), f"cut to {length} of {len(self.cells)}"
        del self.tokens[length:], self.cells[length:]


def ended_parameters(adapter: str) -> SequenceParameters:
    """Return the parameters of a sequence that gets no tokens."""
    return SequenceParameters(sampling=SamplingParams(), prompt_length=1, max_length=2, adapter=adapter)


class HeldCells:
    """The sequences of a shard by their ids, with their cells, in the layout that the shard has."""

    def __init__(self, limits: ShardLimits) -> None:
        self.limits = limits
        self.sequences: dict[int, Held] = {}
        self._numbers = itertools.count()
        # Whether no span of media may be cut.
        self.atomic = False

    @property
    def layout(self) -> LayoutLimits:
        return self.limits.layout

    @property
    def used(self) -> int:
        return self.count(self.sequences.values())

    def count(self, held: Iterable[Held]) -> int:
        """Return how many cells these sequences take together."""
        if not self.layout.shares_cells:
            return sum(len(one.cells) for one in held)
        return len({cell for one in held for cell in one.cells})

    def new(self, count: int) -> list[int]:
        """Return the numbers of so many new cells."""
        return list(itertools.islice(self._numbers, count))

    def copied(self, copy: PrefixCopy, own_id: int, setup: SequenceParameters, *, may_cut: bool = False) -> Held:
        """Make a sequence that begins with a prefix of another, or of what its own id held.

        ``may_cut``: its cells alone are needed.
        """
        source = self.sequences[copy.source_id]
        assert 1 <= copy.length <= len(source.cells), f"{copy.length} of {len(source.cells)} cells"
        assert may_cut or not self.layout.whole_only or copy.length == len(source.cells)
        assert source.setup.adapter == setup.adapter, "cells of another adapter"
        assert not self.atomic or is_border(source.tokens, copy.length), "copied part of a medium"
        cells = source.cells[: copy.length]
        if copy.source_id != own_id and not self.layout.shares_cells:
            cells = self.new(len(cells))
        return Held(setup, source.tokens[: copy.length], cells)

    def check_spans(self, part: Chunk | Row) -> None:
        """Fail if ``part`` has part of a medium that may not be cut."""
        tokens = tokens_of(part)
        for span in part.media if self.atomic else ():
            assert span.first == 0, "the rest of a medium"
            assert is_whole(tokens[span.offset : span.end]), "the beginning of a medium"

    def cut_back(self, starts: Iterable[Chunk | Row], taken_over: set[int]) -> None:
        """Cut the sequences back that a failed step was to take over: that cannot be undone."""
        for start in starts:
            if start.sequence_id in taken_over and start.copy is not None:
                self.sequences[start.sequence_id].cut(start.copy.length)
                self.sequences[start.sequence_id].ended = True

    def check_adapter(self, ids: Iterable[int]) -> None:
        """Fail unless a step with these sequences has one adapter."""
        adapters = {self.sequences[sequence_id].setup.adapter for sequence_id in ids}
        assert len(adapters) == 1, f"a step with the adapters {adapters}"

    def move(self, other: LayoutLimits, lost: Iterable[int], *, shares: bool) -> None:
        """Move all sequences but ``lost`` to another layout. ``shares``: they have equal beginnings in common there."""
        self.limits = replace(self.limits, layout=other, other_layout=self.limits.layout)
        for sequence_id in lost:
            del self.sequences[sequence_id]
        moved: list[Held] = []
        for _, held in sorted(self.sequences.items()):
            assert len(held.cells) <= other.cells_per_sequence, "moved to a layout that has no room for it"
            shared = self._equal_beginning(held, moved) if shares else []
            held.cells = shared + self.new(len(held.cells) - len(shared))
            moved.append(held)
        assert self.used <= other.cells

    def _equal_beginning(self, held: Held, others: Iterable[Held]) -> list[int]:
        if not self.layout.shares_cells or self.layout.whole_only or self.layout.saving is not Saving.ANY:
            return []
        cells = list(takewhile(lambda token: not is_cell(token), held.tokens[: len(held.cells) - 1]))
        found = [
            other.cells[: common_length(cells, other.tokens[: len(other.cells)])]
            for other in others
            if other.setup.adapter == held.setup.adapter
        ]
        return max(found, key=len, default=[])


STATE_BYTES = 3


@dataclass
class Run:
    """A saved run with all tokens up to its end, and the parameters of the sequence it is from."""

    saved: SavedRun
    setup: SequenceParameters
    tokens: list[int]


class Runs:
    """Saves sequences of a shard, and loads them into cells again."""

    def __init__(self, shard: str, cells: HeldCells) -> None:
        self.by_key: dict[bytes, Run] = {}
        self._shard = shard
        self._cells = cells

    @property
    def memory_used(self) -> int:
        return sum(run.saved.size_bytes for run in self.by_key.values() if not run.saved.on_disk)

    def drop(self, key: bytes) -> None:
        self.by_key.pop(key, None)

    def spill(self, key: bytes) -> None:
        """Move a run to the disk, if it is there."""
        if key in self.by_key:
            self.by_key[key].saved = replace(self.by_key[key].saved, on_disk=True)

    def adopt(self, run: Run | None) -> bool:
        """Keep a run of another shard; False if there is none or no room for it."""
        if run is None:
            return False
        key = run.saved.cuts[-1][1]
        if key not in self.by_key:
            if self.memory_used + run.saved.size_bytes > self._cells.limits.memory_bytes:
                return False
            self.by_key[key] = Run(replace(run.saved, on_disk=False), run.setup, run.tokens)
        return True

    def save(self, command: Save, *, refused: bool) -> Saved:
        """Save what the command names; with ``refused``, nothing that is not there."""
        saved: list[bool] = []
        sizes: list[int] = []
        for entry in command.entries:
            held = self._cells.sequences[entry.sequence_id]
            places = [place for place, _ in entry.cuts]
            end = places[-1]
            assert self._cells.layout.saving is not Saving.NOTHING
            with_state = self._cells.layout.saving is Saving.WITH_STATE
            if entry.is_state:
                assert with_state
                assert len(places) == 1
                assert entry.start > 0
            else:
                assert 0 <= entry.start < places[0], f"cuts {places} from {entry.start}"
            assert places == sorted(set(places))
            assert end <= len(held.cells), f"saved up to {end} of {len(held.cells)}"
            known = list(entry.own_note.tokens)
            assert known == (
                [] if any(map(is_cell, held.tokens[entry.start : end])) else held.tokens[entry.start : end]
            )
            assert not self._cells.atomic or is_border(held.tokens, entry.start)
            key = entry.cuts[-1][1]
            size = 0
            is_there = key in self.by_key
            if not is_there and not refused and (not entry.is_state or end == len(held.cells)):
                wanted = STATE_BYTES if entry.is_state else end - entry.start
                is_there = self.memory_used + wanted <= self._cells.limits.memory_bytes
                if is_there:
                    size = wanted
                    run = SavedRun(start=entry.start, cuts=entry.cuts, size_bytes=size, note=entry.own_note)
                    self.by_key[key] = Run(run, held.setup, held.tokens[:end])
            saved.append(is_there)
            sizes.append(size)
            if entry.release:
                del self._cells.sequences[entry.sequence_id]
        return Saved(
            shard=self._shard,
            command_id=command.command_id,
            saved=tuple(saved),
            sizes_bytes=tuple(sizes),
            seconds=0.001,
        )

    def load(self, command: Load, *, breaks: bool) -> Loaded:
        """Load what the command names; with ``breaks``, all runs turn out to be damaged."""
        loaded: list[bool] = []
        bad: list[bytes] = []
        for entry in command.entries:
            assert entry.sequence_id not in self._cells.sequences, f"sequence {entry.sequence_id} exists"
            assert entry.sequence_id < self._cells.limits.max_sequences
            shared = self._shared(entry)
            tokens = [*shared.tokens, *tokens_of(entry)]
            at = len(shared.tokens)
            setup = None
            with_state = self._cells.layout.saving is Saving.WITH_STATE
            for place, piece in enumerate(entry.slices, 1):
                is_state = with_state and place == len(entry.slices)
                assert piece.start == at
                assert (piece.start == piece.end) == is_state
                at = piece.end
                run = self.by_key.get(piece.key)
                if breaks or run is None:
                    self.by_key.pop(piece.key, None)
                    bad.append(piece.key)
                    continue
                assert run.saved.start <= piece.start <= piece.end <= run.saved.cuts[-1][0]
                assert (run.saved.start == run.saved.cuts[-1][0]) == is_state
                assert tokens[: piece.end] == run.tokens[: piece.end]
                assert not self._cells.atomic or is_border(run.tokens, piece.end)
                assert run.setup.adapter == entry.adapter, "cells of another adapter"
                setup = run.setup
            assert at == len(tokens) <= self._cells.layout.cells_per_sequence
            is_loaded = not bad and self._cells.used + len(entry.token_ids) <= self._cells.layout.cells
            loaded.append(is_loaded)
            if is_loaded:
                assert setup is not None
                cells = [*shared.cells, *self._cells.new(len(entry.token_ids))]
                self._cells.sequences[entry.sequence_id] = Held(setup, tokens, cells, ended=True)
        return Loaded(
            shard=self._shard,
            command_id=command.command_id,
            loaded=tuple(loaded),
            bad_runs=tuple(bad),
            seconds=0.001,
        )

    def _shared(self, entry: LoadEntry) -> Held:
        """Return what a loaded sequence begins with of another, if anything."""
        setup = ended_parameters(entry.adapter)
        if entry.copy is None:
            return Held(setup)
        assert self._cells.layout.shares_cells, "loaded cells are shared in the unified layout only"
        return self._cells.copied(entry.copy, entry.sequence_id, setup, may_cut=True)

"""Keeps every cell of sequences with sliding-window attention, so that any prefix of them can be shared and saved.

llama.cpp gives a cell that fell out of its sequence's window to another sequence, also in a cache of full size, and
leaves such cells out of a saved state: the sequence can still grow, but not be cut back.

In the unified layout, llama.cpp never takes a cell that two sequences hold. Therefore each sequence has a guard: a
second sequence id that never takes part in a forward pass and holds the same cells before they can leave the window.
In the split layout, no other sequence looks for cells there. A sequence is saved in pieces no longer than the window.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.commands import PrefixCopy
from caravan_shard.arrays import Ids, State
from caravan_shard.backends.base import CellSlice, TokenBatch
from caravan_shard.backends.llama.memory.cell_state import CacheCells, StateError, StateFormat
from caravan_shard.backends.llama.memory.memory import LlamaMemory
from caravan_shard.media import CellSpan


def ids_needed(sequences: int) -> int:
    """Return how many sequence ids the context must have: a guard for each sequence, and a spare id to save through."""
    return 2 * sequences + 1


class WindowedMemory(LlamaMemory):
    """A LlamaMemory in the unified layout. Every forward pass must fit into one ubatch.

    With several ubatches, cells of the first could leave the window and be taken before a guard holds them.
    """

    def __init__(self, context: Any, *, sequences: int, window: int, transposes: bool) -> None:
        """``window``: the model's sliding window, in tokens."""
        super().__init__(context, copies_whole=False, streams=1, transposes=transposes)
        self._sequences = sequences
        self._window = window
        self._spare_id = 2 * sequences
        # The guard of each sequence holds its positions [0, guarded).
        self._guarded = np.zeros(sequences, np.int32)

    def after_decode(self, batch: TokenBatch) -> None:
        """Guard the cells that may now be outside a window."""
        super().after_decode(batch)
        out_of_window = self._out_of_window(batch.positions + 1)
        for sequence_id in np.unique(batch.sequence_ids[out_of_window > self._guarded[batch.sequence_ids]]).tolist():
            self._guard(sequence_id, self.length(sequence_id))

    def clear(self) -> None:
        """Forget every sequence and guard."""
        super().clear()
        self._guarded[:] = 0

    def trim(self, sequence_id: int, length: int) -> bool:
        """Trim the sequence and its guard."""
        self._guarded[sequence_id] = min(self._guarded[sequence_id], length)
        return super().trim(sequence_id, length) and super().trim(self._sequences + sequence_id, length)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Copy the prefix and guard it at once: the copy may outlive its source."""
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, source_id))
        assert first == 0, f"sequence {source_id} has lost the tokens before {first}"
        super().copy(source_id, destination_id, length)
        self._guard(destination_id, length)

    def _saved(self, form: StateFormat, sequence_id: int, start: int, end: int, *, releasing: bool) -> State:
        """Save piece by piece, through the spare id."""
        pieces = []
        for first, last in self._pieces(start, end):
            llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, self._spare_id, first, last)
            state = self._whole_state(self._spare_id)
            super().trim(self._spare_id, 0)
            pieces.append([cache.cut(first, last) for cache in form.parse(state)])
        return self._built(form, list(zip(*pieces, strict=True)))

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Put saved cells into memory and guard them."""
        restored = super().restore(sequence_id, slices, shared, spans)
        if restored:
            self._guard(sequence_id, self.length(sequence_id))
        return restored

    def _guard(self, sequence_id: int, length: int) -> None:
        guarded = int(self._guarded[sequence_id])
        guard_id = self._sequences + sequence_id
        llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, guard_id, guarded, length)
        self._guarded[sequence_id] = length

    def _out_of_window(self, lengths: Ids) -> Ids:
        """Return the positions up to which cells may be outside the window, for sliding and for chunked attention."""
        return lengths // self._window * self._window

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut [start, end) at multiples of the window."""
        borders = [start, *range(start // self._window * self._window + self._window, end, self._window), end]
        return list(pairwise(borders)) if start < end else []


class SplitWindowedMemory(LlamaMemory):
    """A LlamaMemory in the split layout.

    Only by cutting a sequence back can all of its cells be saved. If it is not released, it is restored afterwards.
    """

    def _saved(self, form: StateFormat, sequence_id: int, start: int, end: int, *, releasing: bool) -> State:
        """Take the cells out piece by piece, the last ones first.

        Raises RuntimeError if the sequence goes on and is damaged now.
        """
        if releasing:
            self.trim(sequence_id, end)
            llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, 0, start)
            return self._built(form, self._taken_out(form, sequence_id, start, end))
        length = self.length(sequence_id)
        try:
            whole = self._built(form, self._taken_out(form, sequence_id, 0, length))
        except StateError as error:
            raise RuntimeError(f"sequence {sequence_id} was cut back and cannot be put back") from error
        self.trim(sequence_id, 0)
        restored = self.put(form, sequence_id, [[cache] for cache in form.parse(whole)])
        assert restored, f"sequence {sequence_id} does not fit where it was"
        if (start, end) == (0, length):
            return whole
        return self._built(form, [[cache.cut(start, end)] for cache in form.parse(whole)])

    def _taken_out(self, form: StateFormat, sequence_id: int, start: int, end: int) -> list[list[CacheCells]]:
        """Return the cells [start, end) of both caches, which are all that the sequence holds, and forget most."""
        base, window = form.parse(self._whole_state(sequence_id))
        pieces = [window]
        window_form = StateFormat(form.caches[1:])
        while (first := _first(pieces[0])) > start:
            self.trim(sequence_id, first)
            state = self._whole_state(sequence_id, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
            pieces.insert(0, window_form.parse(state)[0])
            assert _first(pieces[0]) < first, f"the cells before {first} are lost"
        ranges = pairwise([*(_first(piece) for piece in pieces), end])
        return [[base.cut(start, end)], [piece.cut(*one) for piece, one in zip(pieces, ranges, strict=True)]]


def _first(cells: CacheCells) -> int:
    return int(cells.positions.min())

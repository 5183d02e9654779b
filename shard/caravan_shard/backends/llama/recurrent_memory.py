"""The memory of models with recurrent layers, alone or beside layers that attend (hybrid models).

The cells of layers that attend are saved in runs, which can be cut. The recurrent state cannot be cut. It is saved
apart from them, where a sequence is to be continued.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.commands import PrefixCopy
from caravan_shard.arrays import State
from caravan_shard.backends.base import CellSlice
from caravan_shard.backends.llama.cell_state import StateError, state_head
from caravan_shard.backends.llama.memory import TO_THE_END, LlamaMemory
from caravan_shard.backends.llama.places import Places
from caravan_shard.backends.llama.recurrent_state import RecurrentFormat, find_recurrent_format
from caravan_shard.media.spans import CellSpan

_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class RecurrentMemory(LlamaMemory):
    """A LlamaMemory whose sequences have recurrent state. An empty range of cells stands for the state at its end."""

    def __init__(
        self, context: Any, *, sequences: int, shares_cells: bool, transposes: bool, places: Places | None = None
    ) -> None:
        """``shares_cells``: the layout is unified."""
        streams = 1 if shares_cells else sequences
        super().__init__(context, copies_whole=True, streams=streams, transposes=transposes, places=places)
        self._ids = range(sequences) if shares_cells else range(0)
        self._recurrent: RecurrentFormat | None = None

    @property
    def form(self) -> RecurrentFormat | None:
        """The format that was found; None if states cannot be taken apart."""
        return self._recurrent

    @property
    def shares_cells(self) -> bool:
        """Whether a restored sequence can have cells in common with another."""
        return len(self._ids) > 1

    def find_format(self, sequence_id: int) -> RecurrentFormat | None:
        """Find how states are made, from a sequence of a few tokens; None if they cannot be taken apart."""
        try:
            block = self._whole_state(sequence_id, _PARTIAL)
            self._recurrent = find_recurrent_format(self._whole_state(sequence_id), block)
        except StateError:
            self._recurrent = None
        return self._recurrent

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Return the state of the cells [start, end), or the recurrent one; None if it exceeds ``most_bytes``."""
        form = self._recurrent
        if form is None:
            return None
        size = form.block_bytes if start == end else form.cells_bytes(self._streams, end - start)
        if size > most_bytes:
            return None
        try:
            if start == end:
                return self._whole_state(sequence_id, _PARTIAL)[-form.block_bytes :]
            return self._cells(form, sequence_id, start, end)
        except StateError:
            return None

    def _cells(self, form: RecurrentFormat, sequence_id: int, start: int, end: int) -> State:
        """Return the state of the cells [start, end) without the recurrent one; raises StateError."""
        if form.attention is None:
            return np.frombuffer(state_head(), np.uint8)
        # llama.cpp writes all cells of a sequence. So another one, which nothing uses now, gets the ones to be saved.
        unused = next((one for one in self._ids if self.length(one) == 0), None)
        if unused is None:
            state = self._get_state(sequence_id, self._lent(self._state_bytes(sequence_id)))
        else:
            first, last = (self.places.position(sequence_id, border) for border in (start, end))
            llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, unused, first, last)
            try:
                state = self._get_state(unused, self._lent(self._state_bytes(unused)))
            finally:
                self.trim(unused, 0)
        found = form.parse(state[: -form.block_bytes])
        return self._built(form.attention, [[self.places.cut(cache, sequence_id, start, end)] for cache in found])

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Put saved cells and the state after them, which is last, into memory; False, and nothing is held, if not."""
        assert self.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        form, last = self._recurrent, slices[-1]
        self.places.set(sequence_id, spans)
        # llama.cpp reads at least one cell.
        first = min(shared.length, last.end - 1) if shared is not None and self.shares_cells else 0
        own = [replace(one, start=max(one.start, first)) for one in slices[:-1] if one.end > first]
        try:
            if form is None or last.start != last.end:
                raise StateError("no recurrent state")
            form.check(last.state, int(self.places.all_positions(sequence_id, last.end - 1, last.end)[0]))
            whole = self._whole(form, sequence_id, own, last.state)
        except StateError:
            return False
        if not self._set_state(sequence_id, whole):
            return False
        if shared is None or not first:
            return True
        end = self.places.position(sequence_id, first)
        # The recurrent state of the other sequence comes along, whatever its length, and is replaced.
        llama_cpp.llama_memory_seq_cp(self._memory, shared.source_id, sequence_id, TO_THE_END, end)
        alone = self._lent(len(state_head()) + form.block_bytes)
        alone[: -form.block_bytes] = np.frombuffer(state_head(), np.uint8)
        alone[-form.block_bytes :] = last.state
        return self._set_state(sequence_id, alone, _PARTIAL)

    def _whole(self, form: RecurrentFormat, sequence_id: int, slices: Sequence[CellSlice], block: State) -> State:
        """Return a state of the cells of ``slices`` and of ``block``; raises StateError."""
        pieces = [
            [self.places.cut(cache, sequence_id, one.start, one.end) for cache in form.parse(one.state)]
            for one in slices
        ]
        cells = sum(one.end - one.start for one in slices)
        state = self._lent(form.cells_bytes(self._streams, cells) + form.block_bytes)
        if form.attention is None:
            state[: -form.block_bytes] = np.frombuffer(state_head(), np.uint8)
        else:
            parts = list(zip(*pieces, strict=True))
            form.attention.build(parts, self._streams, state[: -form.block_bytes], transposes=self._transposes)
        state[-form.block_bytes :] = block
        return state

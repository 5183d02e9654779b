"""Cuts, copies, saves and restores sequences in llama.cpp's memory, which is its KV cache."""

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import State
from caravan_shard.backends.base import CellSlice, TokenBatch
from caravan_shard.backends.llama.cell_state import CacheCells, StateError, StateFormat, find_format

TO_THE_END = -1


class LlamaMemory:
    """The memory of one context. Callers have checked ids and lengths: llama.cpp ends the process on some misuses."""

    def __init__(self, context: Any, *, copies_whole: bool, streams: int) -> None:
        """``copies_whole``: llama.cpp can only copy all that the source holds; the copy is then cut."""
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._copies_whole = copies_whole
        self._streams = streams
        # States that are needed for a moment; kept, because new memory is slower to write than to read.
        self._scratch: State = np.empty(0, np.uint8)
        # None if only whole states can be saved.
        self._format: StateFormat | None = None

    def find_format(self, sequence_id: int) -> StateFormat | None:
        """Find how states are made, from a sequence of a few tokens; None if states cannot be taken apart."""
        state = self._whole_state(sequence_id)
        self._format = None if state is None else find_format(state)
        return self._format

    def set_format(self, form: StateFormat | None) -> None:
        """Use a format that was found in another context of the model."""
        self._format = form

    def after_decode(self, batch: TokenBatch) -> None:
        """Note that the tokens of ``batch`` are in memory now."""

    def clear(self) -> None:
        """Forget every sequence."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of the sequence are in memory."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence_id)) + 1

    def trim(self, sequence_id: int, length: int) -> bool:
        """Keep the first ``length`` tokens; False if llama.cpp cannot."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, length or TO_THE_END, TO_THE_END))

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Start a sequence with the first tokens of another: by reference, or by copy in the split layout."""
        assert self.length(destination_id) == 0, f"sequence {destination_id} holds tokens"
        end = TO_THE_END if self._copies_whole else length
        llama_cpp.llama_memory_seq_cp(self._memory, source_id, destination_id, TO_THE_END, end)
        if self._copies_whole and length < self.length(source_id):
            self.trim(destination_id, length)

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Return the state of the cells [start, end); None if it exceeds ``most_bytes`` or cannot be had."""
        if self._format is None:
            size = self._state_bytes(sequence_id)
            return self._whole_state(sequence_id) if size <= most_bytes else None
        if self._format.state_bytes(self._streams, end - start) > most_bytes:
            return None
        if releasing:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, end, TO_THE_END)
            if start > 0:
                llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, 0, start)
        size = self._state_bytes(sequence_id)
        if releasing and size == self._format.state_bytes(self._streams, end - start):
            return self._whole_state(sequence_id)
        state = self._get_state(sequence_id, self._lent(size))
        if state is None:
            return None
        try:
            parts = [[cache.cut(start, end)] for cache in self._format.parse(state)]
        except StateError:
            return None
        return self._built(self._format, parts)

    def restore(self, sequence_id: int, slices: Sequence[CellSlice]) -> bool:
        """Put saved cells into memory; False, and nothing is held, if there is no room or a state is damaged."""
        assert self.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        state = slices[0].state
        if self._format is not None:
            try:
                pieces = [[cache.cut(one.start, one.end) for cache in self._format.parse(one.state)] for one in slices]
            except StateError:
                return False
            state = self._lent(self._format.state_bytes(self._streams, slices[-1].end))
            self._format.build(list(zip(*pieces, strict=True)), self._streams, state)
        return self._set_state(sequence_id, state)

    def _built(self, form: StateFormat, parts: Sequence[Sequence[CacheCells]]) -> State:
        cells = sum(len(part.positions) for part in parts[0])
        state: State = np.empty(form.state_bytes(self._streams, cells), np.uint8)
        form.build(parts, self._streams, state)
        return state

    def _lent(self, size: int) -> State:
        """Return ``size`` bytes that are valid until the next call."""
        if size > self._scratch.nbytes:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def _whole_state(self, sequence_id: int, flags: int = 0) -> State | None:
        return self._get_state(sequence_id, np.empty(self._state_bytes(sequence_id, flags), np.uint8), flags)

    def _get_state(self, sequence_id: int, state: State, flags: int = 0) -> State | None:
        size = state.nbytes
        written = llama_cpp.llama_state_seq_get_data_ext(self._context, _bytes_of(state), size, sequence_id, flags)
        return state if 0 < size == int(written) else None

    def _state_bytes(self, sequence_id: int, flags: int = 0) -> int:
        return int(llama_cpp.llama_state_seq_get_size_ext(self._context, sequence_id, flags))

    def _set_state(self, sequence_id: int, state: State) -> bool:
        size = state.nbytes
        if size == llama_cpp.llama_state_seq_set_data_ext(self._context, _bytes_of(state), size, sequence_id, 0):
            return True
        llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, TO_THE_END, TO_THE_END)
        return False


def _bytes_of(state: State) -> Any:
    return ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))

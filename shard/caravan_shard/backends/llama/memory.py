"""Cuts, copies, saves and restores sequences in llama.cpp's memory, which is its KV cache."""

import ctypes
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import State
from caravan_shard.backends.base import Prefix, TokenBatch

TO_THE_END = -1


class LlamaMemory:
    """The memory of one context. Callers have checked ids and lengths: llama.cpp ends the process on some misuses."""

    def __init__(self, context: Any, *, copies_whole: bool) -> None:
        """``copies_whole``: llama.cpp can only copy all that the source holds; the copy is then cut."""
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._copies_whole = copies_whole

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

    def save(self, sequence_id: int, start: int, most_bytes: int) -> State | None:
        """Forget the tokens before ``start`` and return the state of the rest; None if it exceeds ``most_bytes``."""
        if start > 0:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, 0, start)
        size = self._state_bytes(sequence_id)
        if size > most_bytes:
            return None
        state: State = np.empty(size, np.uint8)
        return state if self._get_state(sequence_id, state) else None

    def restore(self, sequence_id: int, state: State, prefix: Prefix | None) -> bool:
        """Put back a saved state, then the prefix; False, and nothing is held, if there is no room."""
        assert self.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        # llama.cpp clears the sequence first, so the prefix comes second.
        if not self._set_state(sequence_id, state):
            return False
        if prefix is not None:
            llama_cpp.llama_memory_seq_cp(self._memory, prefix.source_id, sequence_id, 0, prefix.length)
        return True

    def _state_bytes(self, sequence_id: int) -> int:
        return int(llama_cpp.llama_state_seq_get_size_ext(self._context, sequence_id, 0))

    def _get_state(self, sequence_id: int, state: State) -> bool:
        size = state.nbytes
        written = llama_cpp.llama_state_seq_get_data_ext(self._context, _bytes_of(state), size, sequence_id, 0)
        return 0 < size == int(written)

    def _set_state(self, sequence_id: int, state: State) -> bool:
        size = state.nbytes
        if size == llama_cpp.llama_state_seq_set_data_ext(self._context, _bytes_of(state), size, sequence_id, 0):
            return True
        llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, TO_THE_END, TO_THE_END)
        return False


def _bytes_of(state: State) -> Any:
    return ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))

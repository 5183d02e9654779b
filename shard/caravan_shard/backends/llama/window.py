"""Keeps every cell of sequences with sliding-window attention, so that any prefix of them can be shared.

llama.cpp gives a cell that fell out of its sequence's window to another sequence, also in a cache of full size, and
leaves such cells out of a saved state: the sequence can still grow, but not be cut back. llama.cpp never takes a cell
that two sequences hold. Therefore each sequence has a guard: a second sequence id that never takes part in a forward
pass and holds the same cells before they can leave the window. A sequence is saved in pieces no longer than the window.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import Ids, State
from caravan_shard.backends.base import Prefix, TokenBatch
from caravan_shard.backends.llama.memory import TO_THE_END, LlamaMemory

_SIZE_BYTES = 8


def ids_needed(sequences: int) -> int:
    """Return how many sequence ids the context must have: a guard for each sequence, and a spare id to save through."""
    return 2 * sequences + 1


class WindowedMemory(LlamaMemory):
    """A LlamaMemory in the unified layout. Every forward pass must fit into one ubatch.

    With several ubatches, cells of the first could leave the window and be taken before a guard holds them.
    """

    def __init__(self, context: Any, *, sequences: int, window: int) -> None:
        """``window``: the model's sliding window, in tokens."""
        super().__init__(context, copies_whole=False)
        self._sequences = sequences
        self._window = window
        self._spare_id = 2 * sequences
        # The guard of each sequence holds its positions [0, guarded).
        self._guarded = np.zeros(sequences, np.int32)

    def after_decode(self, batch: TokenBatch) -> None:
        """Guard the cells that may now be outside a window."""
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
        return super().trim(sequence_id, length) and super().trim(self._guard_of(sequence_id), length)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Copy the prefix and guard it at once: the copy may outlive its source."""
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, source_id))
        assert first == 0, f"sequence {source_id} has lost the tokens before {first}"
        super().copy(source_id, destination_id, length)
        self._guard(destination_id, length)

    def save(self, sequence_id: int, start: int, most_bytes: int) -> State | None:
        """Save piece by piece. The state has the number of pieces, their sizes in bytes, then the pieces."""
        pieces = self._pieces(start, self.length(sequence_id))
        sizes = []
        for piece in pieces:
            with self._lent(sequence_id, piece):
                sizes.append(self._state_bytes(self._spare_id))
        head = np.array([len(sizes), *sizes], np.int64).view(np.uint8)
        if head.nbytes + sum(sizes) > most_bytes:
            return None
        state: State = np.empty(head.nbytes + sum(sizes), np.uint8)
        state[: head.nbytes] = head
        for piece, part in zip(pieces, _parts(state), strict=True):
            with self._lent(sequence_id, piece):
                if not self._get_state(self._spare_id, part):
                    return None
        return state

    def restore(self, sequence_id: int, state: State, prefix: Prefix | None) -> bool:
        """Put back the prefix, then piece after piece; guard each before the next one looks for cells."""
        if prefix is not None:
            self.copy(prefix.source_id, sequence_id, prefix.length)
        for part in _parts(state):
            if not self._set_state(self._spare_id, part):
                self.trim(sequence_id, 0)
                return False
            llama_cpp.llama_memory_seq_cp(self._memory, self._spare_id, sequence_id, TO_THE_END, TO_THE_END)
            self._guard(sequence_id, self.length(sequence_id))
            super().trim(self._spare_id, 0)
        return True

    def _guard(self, sequence_id: int, length: int) -> None:
        guarded = int(self._guarded[sequence_id])
        guard_id = self._guard_of(sequence_id)
        llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, guard_id, guarded, length)
        self._guarded[sequence_id] = length

    def _guard_of(self, sequence_id: int) -> int:
        return self._sequences + sequence_id

    def _out_of_window(self, lengths: Ids) -> Ids:
        """Return the positions up to which cells may be outside the window, for sliding and for chunked attention."""
        return lengths // self._window * self._window

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut [start, end) at multiples of the window."""
        borders = [start, *range(start // self._window * self._window + self._window, end, self._window), end]
        return list(pairwise(borders)) if start < end else []

    @contextmanager
    def _lent(self, sequence_id: int, piece: tuple[int, int]) -> Iterator[None]:
        """Let the spare id hold these positions of the sequence inside the block."""
        llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, self._spare_id, *piece)
        yield
        super().trim(self._spare_id, 0)


def _parts(state: State) -> Iterator[State]:
    count = int(state[:_SIZE_BYTES].view(np.int64)[0])
    begin = _SIZE_BYTES * (1 + count)
    for size in state[_SIZE_BYTES:begin].view(np.int64).tolist():
        yield state[begin : begin + size]
        begin += size

"""Keeps every cell of sequences whose layers attend to a window, so that any prefix of them can be shared.

llama.cpp lets another sequence have a cell that fell out of its sequence's window, also in a cache of full size, and
leaves such cells out of a saved state: what is left can go on, but not be cut back. It never takes a cell that two
sequences hold. So each sequence has a twin, an id that is never computed with and holds the same cells from when they
near the end of the window; and a sequence is saved in pieces that a window covers.
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
    """Sequence ids that the context must have: twins, and one to save and restore through."""
    return 2 * sequences + 1


class WindowedMemory(LlamaMemory):
    """A LlamaMemory in the unified layout, all of whose passes fit into one ubatch.

    Where a pass takes several, cells of the first could leave the window, and be taken, before any twin holds them.
    """

    def __init__(self, context: Any, *, sequences: int, window: int) -> None:
        """``window`` in tokens, as the model has it."""
        super().__init__(context, copies_whole=False)
        self._sequences = sequences
        self._window = window
        self._spare_id = 2 * sequences
        # Positions [0, guarded) of each sequence are its twin's too.
        self._guarded = np.zeros(sequences, np.int32)

    def after_pass(self, batch: TokenBatch) -> None:
        """Guard what may now be outside a window."""
        out_of_window = self._out_of_window(batch.positions + 1)
        for sequence_id in np.unique(batch.sequence_ids[out_of_window > self._guarded[batch.sequence_ids]]).tolist():
            self._guard(sequence_id, self.length(sequence_id))

    def clear(self) -> None:
        """Forget the twins too."""
        super().clear()
        self._guarded[:] = 0

    def trim(self, sequence_id: int, length: int) -> bool:
        """Of the twin too."""
        self._guarded[sequence_id] = min(self._guarded[sequence_id], length)
        return super().trim(sequence_id, length) and super().trim(self._twin_of(sequence_id), length)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """With a twin of its own, since it may outlive its source."""
        first = int(llama_cpp.llama_memory_seq_pos_min(self._memory, source_id))
        assert first == 0, f"sequence {source_id} has lost the tokens before {first}"
        super().copy(source_id, destination_id, length)
        self._guard(destination_id, length)

    def save(self, sequence_id: int, start: int, most_bytes: int) -> State | None:
        """Piece by piece: their count, their sizes in bytes, then themselves."""
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
        """The prefix, then piece by piece, each guarded before the next one looks for cells."""
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
        twin_id = self._twin_of(sequence_id)
        llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, twin_id, guarded, length)
        self._guarded[sequence_id] = length

    def _twin_of(self, sequence_id: int) -> int:
        return self._sequences + sequence_id

    def _out_of_window(self, lengths: Ids) -> Ids:
        """Positions before this may be outside the window; right for sliding windows and for chunks of that size."""
        return lengths // self._window * self._window

    def _pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """[start, end) cut at multiples of the window."""
        borders = [start, *range(start // self._window * self._window + self._window, end, self._window), end]
        return list(pairwise(borders)) if start < end else []

    @contextmanager
    def _lent(self, sequence_id: int, piece: tuple[int, int]) -> Iterator[None]:
        """The spare id holds these positions of the sequence."""
        llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, self._spare_id, *piece)
        yield
        super().trim(self._spare_id, 0)


def _parts(state: State) -> Iterator[State]:
    count = int(state[:_SIZE_BYTES].view(np.int64)[0])
    begin = _SIZE_BYTES * (1 + count)
    for size in state[_SIZE_BYTES:begin].view(np.int64).tolist():
        yield state[begin : begin + size]
        begin += size

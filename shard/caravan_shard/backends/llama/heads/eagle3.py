"""Drafts tokens with an EAGLE-3 head, a file of its own.

It reads what three layers of the model have read at the position before, which its encoder makes into one hidden state,
and predicts tokens of its own, maybe smaller vocabulary. Embeddings and output layer may be those of the model.
"""

import ctypes
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats, Ids
from caravan_shard.backends.base import Capacity, TokenBatch
from caravan_shard.backends.llama.heads.chain import ChainHead
from caravan_shard.backends.llama.heads.opened_file import OpenedFile
from caravan_shard.backends.llama.heads.states import KeptStates, computed_states
from caravan_shard.backends.llama.memory.context import OpenContext


class Eagle3Head(ChainHead):
    """An EAGLE-3 head for the sequences of a model."""

    def __init__(self, file: OpenedFile, facts: ModelFile, capacity: Capacity) -> None:
        """``facts`` and ``capacity`` are those of the model."""
        self._file = file
        longest = capacity.current.cells_per_sequence
        # There is no state before the first token.
        states = KeptStates(capacity.max_sequences, file.state_size, longest, reads_first=False)
        super().__init__(facts, capacity, states, file.size)
        # The rows of the last batch whose logits were asked for, and how many it had.
        self._rows: Ids = np.empty(0, np.int32)
        self._row_count = 0

    def follow(self, opened: OpenContext) -> None:
        """Let the context of the model hand out what the layers read, and make one of the head that goes with it."""
        super().follow(opened)
        super().close()  # reads weights by way of the freed one
        self._open(self._file.pointer, self._file.parameters(opened.context, self.capacity.max_sequences))

    def _computed(self, context: Any, rows: int) -> Floats:
        return self._file.read(context, rows)

    def _read_with(self, batch: TokenBatch) -> Floats | None:
        kept = self._states.read(batch.sequence_ids, batch.positions)
        are_computed = self._states.are_computed(batch.sequence_ids, batch.positions)
        states = np.ascontiguousarray(kept[:, : self._size])
        if are_computed.any():
            encoded = self._encoded(kept[are_computed, : self._file.floats_read])
            if encoded is None:
                return None
            states[are_computed] = encoded
        return states

    def _encoded(self, inputs: Floats) -> Floats | None:
        """Return the hidden states [rows, size] of what the layers have read; None if that fails."""
        inputs = np.ascontiguousarray(inputs)
        batch = llama_cpp.llama_batch()
        batch.n_tokens = len(inputs)
        batch.embd = ctypes.cast(inputs.ctypes.data, type(batch.embd))
        if llama_cpp.llama_encode(self._context, batch) != 0:
            return None
        return computed_states(self._context, len(inputs), self._size)

    def _with_outputs(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with all outputs or none: the graph makes all, and llama.cpp takes the first ones."""
        self._rows, self._row_count = np.flatnonzero(batch.outputs).astype(np.int32), len(batch.outputs)
        return batch._replace(outputs=np.ones_like(batch.outputs)) if len(self._rows) else batch

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary]; tokens that the head does not know have -inf."""
        return super().logits(self._row_count)[self._rows[:rows]]

    def close(self) -> None:
        """Free the context and the weights."""
        super().close()
        self._file.close()

"""Drafts tokens with a DFlash or DSpark head, a file of its own.

It keeps cells of what some layers of the model have read of each token. One pass makes a whole block: the last token,
then unknown ones, which see each other and these cells. Embeddings and output layer may be those of the model. With a
DSpark head, a token also depends on the one that the pass has chosen before it.
"""

from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Capacity, TokenBatch
from caravan_shard.backends.llama.heads.head import LlamaHead
from caravan_shard.backends.llama.heads.opened_file import OpenedFile
from caravan_shard.backends.llama.heads.states import KeptStates
from caravan_shard.backends.llama.memory.context import OpenContext, position_dimensions

# Dimensions of positions that are those of texts; llama.cpp has one more.
_OF_TEXTS = 3


class DflashHead(LlamaHead):
    """A head that drafts blocks for the sequences of a model. A batch has outputs of all rows, or of none to read."""

    def __init__(self, file: OpenedFile, facts: ModelFile, capacity: Capacity) -> None:
        """``facts`` and ``capacity`` are those of the model."""
        self._file = file
        self.block = file.facts.block
        self._dimensions = position_dimensions(file.pointer)
        longest = capacity.current.cells_per_sequence
        # A token is read by what the model has read at its own position.
        states = KeptStates(capacity.max_sequences, file.state_size, longest, reads_first=False, lag=0)
        super().__init__(facts, capacity, states)

    def follow(self, opened: OpenContext) -> None:
        """Let the context of the model hand out what the layers read, and make one of the head that goes with it."""
        super().follow(opened)
        super().close()  # reads weights by way of the freed one
        self._open(self._file.pointer, self._file.parameters(opened.context, self.capacity.max_sequences))
        llama_cpp.llama_set_causal_attn(self._context, self._file.facts.is_causal)

    def _computed(self, context: Any, rows: int) -> Floats:
        return self._file.read(context, rows)

    def _filled(self, batch: TokenBatch) -> Any:
        positions = self._places.positions(batch)
        if batch.outputs.any():
            return self._batch.fill(batch, positions)
        planes = np.zeros((self._dimensions, len(positions)), np.int32)
        planes[:_OF_TEXTS] = positions
        return self._batch.fill_media(batch, planes, self._states.read(batch.sequence_ids, batch.positions))

    def _finish(self, batch: TokenBatch) -> None:
        if not batch.outputs.any():
            self._lengths[batch.sequence_ids] = batch.positions + 1
            return
        first = np.flatnonzero(np.diff(batch.sequence_ids, prepend=-1))
        for sequence_id, start in zip(batch.sequence_ids[first].tolist(), batch.positions[first].tolist(), strict=True):
            self.trim(sequence_id, start)
            self._lengths[sequence_id] = start

    def close(self) -> None:
        """Free the context and the weights."""
        super().close()
        self._file.close()

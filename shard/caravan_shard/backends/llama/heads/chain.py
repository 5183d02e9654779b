"""Heads that draft a token in each pass.

At the position of a token, such a head reads that token and what the model has computed at the position before, and
predicts the next token. To draft a second token, it reads its own first one and its own hidden state.
"""

from abc import abstractmethod
from typing import Any

from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Capacity, TokenBatch
from caravan_shard.backends.llama.heads.head import LlamaHead
from caravan_shard.backends.llama.heads.states import KeptStates, compute_states, computed_states


class ChainHead(LlamaHead):
    """A head for which tokens with outputs are the last ones of their sequences."""

    def __init__(self, facts: ModelFile, capacity: Capacity, states: KeptStates, size: int) -> None:
        """``facts`` and ``capacity`` are those of the model. ``size``: floats of a hidden state of the head."""
        super().__init__(facts, capacity, states)
        self._size = size

    def _open(self, model: Any, parameters: Any) -> None:
        super()._open(model, parameters)
        compute_states(self._context)

    @abstractmethod
    def _read_with(self, batch: TokenBatch) -> Floats | None:
        """Return the hidden states that the head reads with the tokens [rows, size]; None if that fails."""

    def _with_outputs(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the outputs that llama.cpp must be asked for."""
        return batch

    def _filled(self, batch: TokenBatch) -> Any:
        states = self._read_with(batch)
        if states is None:
            return None
        return self._batch.fill(self._with_outputs(batch), self._places.positions(batch), states)

    def _finish(self, batch: TokenBatch) -> None:
        self._lengths[batch.sequence_ids] = batch.positions + 1
        rows = batch.outputs != 0
        states = computed_states(self._context, len(rows), self._size)
        # The model computes those of the tokens that it has not computed; until then, a draft goes on with these.
        self._states.put(batch.sequence_ids[rows], batch.positions[rows], states[rows])

"""Drafts tokens with an EAGLE-3 head, a file of its own.

It reads what three layers of the model have read at the position before, which its encoder makes into one hidden state,
and predicts tokens of its own, maybe smaller vocabulary. Embeddings and output layer may be those of the model.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import Floats, Ids
from caravan_shard.backends.base import Capacity, TokenBatch
from caravan_shard.backends.llama.heads.head import LlamaHead, set_head_parameters
from caravan_shard.backends.llama.heads.states import KeptStates, compute_inputs, computed_inputs, computed_states
from caravan_shard.backends.llama.memory.context import Contexts, OpenContext
from caravan_shard.backends.llama.model.loading import LoadedModel


def eagle3_parameters(contexts: Contexts, sequences: int, context: Any) -> Any:
    """Return the ``llama_context_params`` of a head's context. ``contexts``: of its file; ``context``: the model's."""
    parameters = contexts.parameters(contexts.layouts[0])
    set_head_parameters(parameters, sequences)
    # llama.cpp makes room for the logits of all tokens of a batch, also where it encodes.
    most = max(sequences, contexts.prompt_logprob_tokens)
    parameters.n_batch = parameters.n_ubatch = parameters.n_outputs_max = min(contexts.batch_tokens, most)
    # Whose weights it uses where the file has none. llama.cpp reads them from there whenever it builds a graph.
    parameters.ctx_other = context
    return parameters


def state_size(model: Any, head: Any, layers: Sequence[int]) -> int:
    """Return the floats of a kept state: what ``layers`` of the model read, or a hidden state of the head."""
    return max(len(layers) * int(llama_cpp.llama_model_n_embd(model)), int(llama_cpp.llama_model_n_embd(head)))


class Eagle3Head(LlamaHead):
    """An EAGLE-3 head for the sequences of a model."""

    def __init__(self, head: LoadedModel, model: LoadedModel, contexts: Contexts, capacity: Capacity) -> None:
        """``contexts``: of the head. ``capacity``: of the model."""
        self._head = head
        self._layers = model.eagle3_layers
        self._contexts = contexts
        self._input_size = int(llama_cpp.llama_model_n_embd(model.pointer))
        size, longest = state_size(model.pointer, head.pointer, self._layers), capacity.current.cells_per_sequence
        # There is no state before the first token.
        states = KeptStates(capacity.max_sequences, size, longest, reads_first=False)
        super().__init__(model.facts, capacity, states, int(llama_cpp.llama_model_n_embd(head.pointer)))
        # The rows of the last batch whose logits were asked for, and how many it had.
        self._rows: Ids = np.empty(0, np.int32)
        self._row_count = 0

    def follow(self, opened: OpenContext) -> None:
        """Let the context of the model hand out what the layers read, and make one of the head that goes with it."""
        super().follow(opened)
        compute_inputs(opened.context, self._layers)
        super().close()  # reads weights by way of the freed one
        self._open(self._head.pointer, eagle3_parameters(self._contexts, self.capacity.max_sequences, opened.context))

    def _computed(self, context: Any, rows: int) -> Floats:
        return computed_inputs(context, self._layers, rows, self._input_size)

    def _read_with(self, batch: TokenBatch) -> Floats | None:
        kept = self._states.before(batch.sequence_ids, batch.positions)
        are_computed = self._states.are_computed(batch.sequence_ids, batch.positions)
        states = np.ascontiguousarray(kept[:, : self._size])
        if are_computed.any():
            encoded = self._encoded(kept[are_computed, : len(self._layers) * self._input_size])
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
        self._head.close()

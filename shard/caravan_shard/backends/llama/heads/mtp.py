"""Drafts tokens with a model's own head for the tokens after the next one (multi-token prediction, MTP).

The head is a layer behind those of the model, over whose weights it has a second context.
"""

from typing import Any

import llama_cpp

from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Capacity, TokenBatch
from caravan_shard.backends.llama.heads.chain import ChainHead
from caravan_shard.backends.llama.heads.head import set_head_parameters
from caravan_shard.backends.llama.heads.states import KeptStates, compute_states, computed_states
from caravan_shard.backends.llama.memory.context import Contexts, OpenContext


def mtp_parameters(contexts: Contexts, sequences: int) -> Any:
    """Return the ``llama_context_params`` of the head's context."""
    parameters = contexts.parameters(contexts.layouts[0])
    parameters.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
    set_head_parameters(parameters, sequences)
    return parameters


class MtpHead(ChainHead):
    """The head of a model for its own sequences."""

    def __init__(self, model: Any, contexts: Contexts, facts: ModelFile, capacity: Capacity) -> None:
        """``facts`` and ``capacity`` are those of the model; raises StartupError."""
        size, longest = int(llama_cpp.llama_model_n_embd_out(model)), capacity.current.cells_per_sequence
        states = KeptStates(capacity.max_sequences, size, longest, reads_first=True)
        super().__init__(facts, capacity, states, size)
        self._open(model, mtp_parameters(contexts, capacity.max_sequences))

    def follow(self, opened: OpenContext) -> None:
        """Let the context of the model hand out the hidden states of all tokens."""
        super().follow(opened)
        compute_states(opened.context)

    def _computed(self, context: Any, rows: int) -> Floats:
        return computed_states(context, rows, self._size)

    def _read_with(self, batch: TokenBatch) -> Floats:
        return self._states.read(batch.sequence_ids, batch.positions)

"""Drafts tokens with a model's own head for the tokens after the next one (multi-token prediction, MTP).

The head is a layer behind those of the model. At the position of a token, it reads that token and the hidden state that
the model has computed at the position before, and predicts the next token. It has cells of its own, in a second context
over the same weights. To draft a second token, it reads its own first one and its own hidden state.
"""

from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Capacity, DecodeOutcome, StartupError, TokenBatch
from caravan_shard.backends.llama.batch import LlamaBatch, outcome_of
from caravan_shard.backends.llama.heads.states import KeptStates, compute_states, computed_states
from caravan_shard.backends.llama.memory.context import Contexts, OpenContext
from caravan_shard.backends.llama.memory.memory import TO_THE_END
from caravan_shard.backends.llama.memory.places import Places


def head_parameters(contexts: Contexts, sequences: int) -> Any:
    """Return the ``llama_context_params`` of the head's context."""
    parameters = contexts.parameters(contexts.layouts[0])
    parameters.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
    parameters.kv_unified = True
    parameters.n_seq_max = parameters.n_outputs_max = sequences
    # Its layer attends: there is no recurrent state.
    parameters.n_rs_seq = 0
    return parameters


class LlamaHead:
    """A DraftModel: the head of a model for its own sequences."""

    # They were computed of the head's own hidden states, not of the model's.
    keeps_drafts = False

    def __init__(self, model: Any, contexts: Contexts, facts: ModelFile, capacity: Capacity) -> None:
        """``facts`` and ``capacity`` are those of the model; raises StartupError."""
        sequences = capacity.max_sequences
        self._context = llama_cpp.llama_init_from_model(model, head_parameters(contexts, sequences))
        if not self._context:
            raise StartupError("llama.cpp cannot make a context for the head of the model: pass --spec-type none")
        compute_states(self._context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        cells = int(llama_cpp.llama_n_ctx(self._context))
        limits = LayoutLimits(
            layout=KvLayout.UNIFIED,
            cells=cells,
            cells_per_sequence=cells,
            whole_only=False,
            rollback_tokens=0,
            saving=Saving.NOTHING,
        )
        self.facts = facts
        self.capacity = Capacity(
            layouts=(limits,),
            max_sequences=sequences,
            max_batch_tokens=capacity.max_batch_tokens,
            max_prompt_logprob_tokens=0,
        )
        self._size = int(llama_cpp.llama_model_n_embd_out(model))
        self._states = KeptStates(sequences, self._size, capacity.current.cells_per_sequence)
        self._batch = LlamaBatch(capacity.max_batch_tokens)
        self._places = Places()
        # How many tokens of each sequence it has read, or passed over.
        self._lengths = np.zeros(sequences, np.int64)

    def follow(self, opened: OpenContext) -> None:
        """Get hidden states from this context of the model from now on."""
        compute_states(opened.context)
        self._places = opened.memory.places

    def note(self, batch: TokenBatch, context: Any) -> None:
        """Keep the hidden states of the last forward pass of the model, in ``context``."""
        self._states.note(batch, computed_states(context, len(batch.tokens), self._size))

    def forget_model(self) -> None:
        """Note that the model has no sequences any more."""
        self._states.forget()

    def cut_model(self, sequence_id: int, length: int) -> None:
        """Note that the model keeps the first ``length`` tokens of a sequence."""
        self._states.cut(sequence_id, length)

    def copy_model(self, source_id: int, destination_id: int, length: int) -> None:
        """Note that the model lets a sequence start with the first tokens of another."""
        self._states.copy(source_id, destination_id, length)

    def readable(self, sequence_id: int) -> range:
        """Return the positions of the tokens that it can read: the model has computed the ones before them lately."""
        return self._states.readable(sequence_id)

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Read tokens; those with outputs are the last ones of their sequences."""
        first = np.flatnonzero(np.diff(batch.sequence_ids, prepend=-1))
        ids, starts = batch.sequence_ids[first].tolist(), batch.positions[first].tolist()
        for sequence_id, start in zip(ids, starts, strict=True):
            if self._lengths[sequence_id] != start:
                # llama.cpp wants no gaps. What comes before is not seen any more.
                self.trim(sequence_id, 0)
        positions = self._places.positions(batch)
        struct = self._batch.fill(batch, positions, self._states.before(batch.sequence_ids, batch.positions))
        outcome = outcome_of(llama_cpp.llama_decode(self._context, struct))
        llama_cpp.llama_synchronize(self._context)
        if outcome is DecodeOutcome.OK:
            self._lengths[batch.sequence_ids] = batch.positions + 1
            rows = batch.outputs != 0
            states = computed_states(self._context, len(rows), self._size)
            # The model computes those of the tokens that it has not computed; until then, a draft goes on with these.
            self._states.put(batch.sequence_ids[rows], batch.positions[rows], states[rows])
        return outcome

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary]; a view of llama.cpp's own buffer."""
        pointer = llama_cpp.llama_get_logits(self._context)
        assert pointer, "the last forward pass had no outputs"
        found: Floats = np.ctypeslib.as_array(pointer, (rows, self.facts.vocabulary_size))
        return found

    def trim(self, sequence_id: int, length: int) -> bool:
        """Keep the first ``length`` tokens of the sequence."""
        first = self._places.position(sequence_id, length) if length else TO_THE_END
        llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, first, TO_THE_END)
        self._lengths[sequence_id] = min(self._lengths[sequence_id], length)
        return True

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Let ``destination_id``, which holds nothing, start with the first ``length`` tokens of ``source_id``."""
        end = self._places.position(source_id, length)
        llama_cpp.llama_memory_seq_cp(self._memory, source_id, destination_id, TO_THE_END, end)
        self._lengths[destination_id] = min(self._lengths[source_id], length)

    def close(self) -> None:
        """Free the context."""
        llama_cpp.llama_free(self._context)

"""What all heads have in common: layers that draft from the hidden states that a model has just computed.

A head has cells of its own, in a second context.
"""

from abc import ABC, abstractmethod
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Capacity, DecodeOutcome, DraftBlock, TokenBatch
from caravan_shard.backends.llama.batch import LlamaBatch, outcome_of
from caravan_shard.backends.llama.heads.states import KeptStates
from caravan_shard.backends.llama.memory.context import OpenContext
from caravan_shard.backends.llama.memory.memory import TO_THE_END
from caravan_shard.backends.llama.memory.places import Places
from caravan_shard.startup_error import StartupError


def set_head_parameters(parameters: Any, sequences: int) -> None:
    """Set the fields of a ``llama_context_params`` that are the same for all heads."""
    parameters.kv_unified = True
    parameters.n_seq_max = parameters.n_outputs_max = sequences
    # Its layer attends: there is no recurrent state.
    parameters.n_rs_seq = 0


class LlamaHead(ABC):
    """A DraftModel for the sequences of the model whose hidden states it reads."""

    # They were computed of the head's own hidden states, not of the model's.
    keeps_drafts = False
    block: DraftBlock | None = None

    def __init__(self, facts: ModelFile, capacity: Capacity, states: KeptStates) -> None:
        """``facts`` and ``capacity`` are those of the model."""
        self.facts = facts
        # Of the head itself once it has a context.
        self.capacity = capacity
        self._states = states
        self._places = Places()
        self._context: Any = None
        # How many tokens of each sequence it has read, or passed over.
        self._lengths = np.zeros(capacity.max_sequences, np.int64)

    def _open(self, model: Any, parameters: Any) -> None:
        """Make the context; raises StartupError."""
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise StartupError("llama.cpp cannot make a context for the head that drafts: pass a smaller -c")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._lengths[:] = 0
        self._batch = LlamaBatch(parameters.n_batch)
        cells = int(llama_cpp.llama_n_ctx(self._context))
        limits = LayoutLimits(
            layout=KvLayout.UNIFIED,
            cells=cells,
            cells_per_sequence=cells,
            whole_only=False,
            rollback_tokens=0,
            saving=Saving.NOTHING,
        )
        self.capacity = Capacity(
            layouts=(limits,),
            max_sequences=parameters.n_seq_max,
            max_batch_tokens=parameters.n_batch,
            max_prompt_logprob_tokens=0,
        )

    def follow(self, opened: OpenContext) -> None:
        """Get hidden states from this context of the model from now on, which may have replaced a freed one."""
        self._places = opened.memory.places

    @abstractmethod
    def _computed(self, context: Any, rows: int) -> Floats:
        """Return what the model has computed in ``context`` for each of its last ``rows``, as `KeptStates` keeps it."""

    @abstractmethod
    def _filled(self, batch: TokenBatch) -> Any:
        """Return the struct for llama_decode; None if what it reads cannot be computed."""

    @abstractmethod
    def _finish(self, batch: TokenBatch) -> None:
        """Note which tokens it has read after a pass over ``batch``."""

    def note(self, batch: TokenBatch, context: Any) -> None:
        """Keep the hidden states of the last forward pass of the model, in ``context``."""
        self._states.note(batch, self._computed(context, len(batch.tokens)))

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
        """Read tokens."""
        first = np.flatnonzero(np.diff(batch.sequence_ids, prepend=-1))
        ids, starts = batch.sequence_ids[first].tolist(), batch.positions[first].tolist()
        for sequence_id, start in zip(ids, starts, strict=True):
            if self._lengths[sequence_id] != start:
                # llama.cpp wants no gaps. What comes before is not seen any more.
                self.trim(sequence_id, 0)
        struct = self._filled(batch)
        if struct is None:
            return DecodeOutcome.FAILED
        outcome = outcome_of(llama_cpp.llama_decode(self._context, struct))
        llama_cpp.llama_synchronize(self._context)
        if outcome is DecodeOutcome.OK:
            self._finish(batch)
        return outcome

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary]; maybe a view of llama.cpp's own buffer."""
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
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._context = None

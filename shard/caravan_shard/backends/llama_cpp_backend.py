"""The backend over llama.cpp: its C functions directly, one context, one thread.

llama.cpp ends the process on several misuses (a batch over n_batch, more outputs than n_outputs_max, a partial copy in
the split layout): each is ruled out here or asserted before the call.
"""

import ctypes
import logging
from pathlib import Path
from time import monotonic
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.backends.base import (
    Capacity,
    DecodeOutcome,
    Floats,
    KvLayout,
    Prefix,
    PrefixSharing,
    StartupError,
    State,
    TokenBatch,
)
from caravan_shard.backends.llama_batch import LlamaBatch
from caravan_shard.backends.llama_filter import LlamaFilter
from caravan_shard.backends.llama_log import route_llama_log
from caravan_shard.backends.llama_model import check_model_file, load_model, model_facts
from caravan_shard.backends.llama_vocabulary import LlamaVocabulary
from caravan_shard.config import CELL_BLOCK, ShardConfig

_log = logging.getLogger(__name__)

_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_TO_THE_END = -1
# enum ggml_type; the bindings name only some of them.
_CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}


def _outcome(code: int) -> DecodeOutcome:
    match code:
        case 0:
            return DecodeOutcome.OK
        case 1:
            return DecodeOutcome.NO_KV
        case 2:
            return DecodeOutcome.ABORTED
        case -1:
            return DecodeOutcome.INVALID
        case _:
            return DecodeOutcome.FAILED


class LlamaCppBackend:
    """A Backend. The thread that makes it must be the one that uses it: OpenMP keeps its threads by caller."""

    def __init__(self, config: ShardConfig) -> None:
        """Load and warm up; raises StartupError."""
        path = Path(config.model)
        check_model_file(path)
        started = monotonic()
        _log.info("loading %s", path.name, extra={"mib": path.stat().st_size >> 20})
        route_llama_log()
        llama_cpp.llama_backend_init()
        self._model = load_model(path, config.gpu_layers)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = LlamaVocabulary(vocab)
        self.facts = model_facts(path, self._model, vocab, self.vocabulary)
        self.candidate_filter = LlamaFilter(self.vocabulary.size)
        self._context = self._make_context(config)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self.capacity = self._measure_capacity(config)
        self._batch = LlamaBatch(self.capacity.max_batch_tokens)
        self._logits_address = 0
        self._logits: Floats = np.empty((0, self.vocabulary.size), np.float32)
        self._warm_up()
        _log.info(
            "model ready",
            extra={
                "seconds": round(monotonic() - started, 1),
                "cells": self.capacity.cells,
                "cells_per_sequence": self.capacity.cells_per_sequence,
                "layout": config.kv_layout,
                "threads": config.decode_threads,
                "threads_batch": config.batch_threads,
            },
        )

    def _make_context(self, config: ShardConfig) -> Any:
        cells = config.ctx_size or self.facts.trained_context
        if config.layout is KvLayout.SPLIT and cells < config.parallel * CELL_BLOCK:
            raise StartupError(
                f"kv-layout split needs {CELL_BLOCK} cells for each of {config.parallel} sequences and the model was "
                f"trained with {cells}: pass -c {config.parallel * CELL_BLOCK} or --kv-layout unified"
            )
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = cells
        parameters.n_batch = config.batch_size
        parameters.n_ubatch = min(config.ubatch_size, config.batch_size)
        parameters.n_seq_max = config.parallel
        # One output per sequence and pass; llama.cpp reserves memory for as many as it is told.
        parameters.n_outputs_max = config.parallel
        parameters.n_threads = config.decode_threads
        parameters.n_threads_batch = config.batch_threads
        parameters.flash_attn_type = _FLASH_ATTENTION[config.flash_attn]
        parameters.type_k = _CACHE_TYPES[config.cache_type_k]
        parameters.type_v = _CACHE_TYPES[config.cache_type_v]
        parameters.kv_unified = config.layout is KvLayout.UNIFIED
        parameters.offload_kqv = True
        parameters.no_perf = True
        # With a sliding window alone, a prefix could not be cut back to or shared.
        parameters.swa_full = True
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise StartupError(
                f"llama.cpp cannot make a context of {cells} cells: pass a smaller -c, other -ctk/-ctv, or -fa on "
                "for quantized values; see --log-level debug"
            )
        return context

    def _measure_capacity(self, config: ShardConfig) -> Capacity:
        per_sequence = int(llama_cpp.llama_n_ctx_seq(self._context))
        trained = self.facts.trained_context
        window = int(llama_cpp.llama_model_n_swa(self._model))
        # Cells that fell out of the window may be taken by other sequences, and are not saved.
        windowed = 0 < window < per_sequence
        stateful = llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        return Capacity(
            cells=int(llama_cpp.llama_n_ctx(self._context)),
            cells_per_sequence=min(per_sequence, trained) if trained > 0 else per_sequence,
            max_sequences=config.parallel,
            max_batch_tokens=int(llama_cpp.llama_n_batch(self._context)),
            layout=config.layout,
            sharing=PrefixSharing.WHOLE_ONLY if stateful or windowed else PrefixSharing.ANY,
        )

    def _warm_up(self) -> None:
        """One pass over one token and one over two, so that the first client pays for no memory and no threads."""
        for count in (1, 2):
            tokens = np.zeros(count, np.int32)
            outputs = np.zeros(count, np.int8)
            outputs[-1] = 1
            batch = TokenBatch(tokens, np.arange(count, dtype=np.int32), np.zeros(count, np.int32), outputs)
            outcome = self.decode(batch)
            llama_cpp.llama_memory_clear(self._memory, True)
            if outcome is not DecodeOutcome.OK:
                raise StartupError(f"the first forward pass failed ({outcome.value}); see --log-level debug")

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """llama_decode, until its logits are there."""
        outputs = int(np.count_nonzero(batch.outputs))
        assert outputs <= self.capacity.max_sequences, f"{outputs} outputs of {self.capacity.max_sequences}"
        outcome = _outcome(llama_cpp.llama_decode(self._context, self._batch.fill(batch)))
        llama_cpp.llama_synchronize(self._context)
        return outcome

    def logits(self, rows: int) -> Floats:
        """[rows, vocabulary], over llama.cpp's own buffer."""
        pointer = llama_cpp.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        assert address, "the last pass had no outputs"
        if address != self._logits_address:
            # The buffer has room for n_seq_max rows at least.
            shape = (self.capacity.max_sequences, self.vocabulary.size)
            self._logits = np.ctypeslib.as_array(pointer, shape)
            self._logits_address = address
        return self._logits[:rows]

    def length(self, sequence_id: int) -> int:
        """Tokens in memory."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence_id)) + 1

    def trim(self, sequence_id: int, length: int) -> bool:
        """llama_memory_seq_rm to the end."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, length or _TO_THE_END, _TO_THE_END))

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """llama_memory_seq_cp: by reference in the unified layout, of the whole and then cut in the split one."""
        assert self.length(destination_id) == 0, f"sequence {destination_id} holds tokens"
        whole = self.capacity.layout is KvLayout.SPLIT or self.capacity.sharing is PrefixSharing.WHOLE_ONLY
        end = _TO_THE_END if whole else length
        llama_cpp.llama_memory_seq_cp(self._memory, source_id, destination_id, _TO_THE_END, end)
        if whole and length < self.length(source_id):
            self.trim(destination_id, length)

    def save(self, sequence_id: int, start: int, most_bytes: int) -> State | None:
        """llama_state_seq_get_data, of what llama_memory_seq_rm leaves."""
        assert start == 0 or self.capacity.saves_suffixes, "only whole sequences can be saved"
        if start > 0:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, 0, start)
        size = int(llama_cpp.llama_state_seq_get_size_ext(self._context, sequence_id, 0))
        if not 0 < size <= most_bytes:
            return None
        state: State = np.empty(size, np.uint8)
        written = llama_cpp.llama_state_seq_get_data_ext(self._context, _bytes_of(state), size, sequence_id, 0)
        return state if written == size else None

    def restore(self, sequence_id: int, state: State, prefix: Prefix | None) -> bool:
        """llama_state_seq_set_data, which clears the sequence first; then the prefix."""
        assert self.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        size = state.nbytes
        read = llama_cpp.llama_state_seq_set_data_ext(self._context, _bytes_of(state), size, sequence_id, 0)
        if read != size:
            self.trim(sequence_id, 0)
            return False
        if prefix is not None:
            llama_cpp.llama_memory_seq_cp(self._memory, prefix.source_id, sequence_id, 0, prefix.length)
        return True

    def close(self) -> None:
        """Free the context, then the model."""
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _bytes_of(state: State) -> Any:
    return ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))

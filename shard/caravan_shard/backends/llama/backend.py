"""The backend over llama.cpp: one model, one context (and a second one for embeddings), one thread."""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import llama_cpp
import numpy as np

from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import DecodeOutcome, Prefix, StartupError, TokenBatch
from caravan_shard.backends.llama.adapters import LlamaAdapters
from caravan_shard.backends.llama.batch import LlamaBatch
from caravan_shard.backends.llama.context import open_context
from caravan_shard.backends.llama.embedder import LlamaEmbedder
from caravan_shard.backends.llama.filter import LlamaFilter
from caravan_shard.backends.llama.log import route_llama_log
from caravan_shard.backends.llama.model import check_gguf_file, load_model, model_facts
from caravan_shard.backends.llama.vocabulary import LlamaVocabulary
from caravan_shard.config import ShardConfig

_log = logging.getLogger(__name__)


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
    """A Backend. The thread that makes it must also use it: OpenMP keeps a thread pool per calling thread."""

    def __init__(self, config: ShardConfig) -> None:
        """Load and warm up; raises StartupError."""
        path = Path(config.model)
        check_gguf_file(path, "model", "-m")
        for adapter in config.adapters:
            check_gguf_file(adapter.path, "adapter", "--lora")
        started = monotonic()
        _log.info("loading %s", path.name, extra={"mib": path.stat().st_size >> 20})
        route_llama_log()
        llama_cpp.llama_backend_init()
        self._model = load_model(path, config.gpu_layers)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = LlamaVocabulary(vocab)
        self._adapters = LlamaAdapters(self._model, config.adapters)
        facts = model_facts(path, config.gpu_layers, self._model, vocab, self.vocabulary)
        self.facts = replace(facts, adapters=self._adapters.names)
        self.candidate_filter = LlamaFilter(self.vocabulary.size)
        opened = open_context(self._model, config, self.facts.trained_context)
        self._context = opened.context
        self._memory = opened.memory
        self.capacity = opened.capacity
        self._embedder: LlamaEmbedder | None = None
        if config.embeddings:
            self._embedder = LlamaEmbedder(self._model, config, self.facts)
            self.capacity = replace(
                opened.capacity, embedding_size=self._embedder.size, max_embed_tokens=self._embedder.max_tokens
            )
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

    def _warm_up(self) -> None:
        """Run a forward pass over one token and one over two, to allocate memory and start threads."""
        for count in (1, 2):
            tokens = np.zeros(count, np.int32)
            outputs = np.zeros(count, np.int8)
            outputs[-1] = 1
            batch = TokenBatch(tokens, np.arange(count, dtype=np.int32), np.zeros(count, np.int32), outputs)
            outcome = self.decode(batch)
            self._memory.clear()
            if outcome is not DecodeOutcome.OK:
                raise StartupError(f"the first forward pass failed ({outcome.value}); see --log-level debug")

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Run llama_decode and wait for its logits."""
        outputs = batch.output_count
        most = self.capacity.max_sequences + self.capacity.max_prompt_logprob_tokens
        assert outputs <= most, f"{outputs} outputs of {most}"
        self._adapters.apply(self._context, batch.adapter)
        outcome = _outcome(llama_cpp.llama_decode(self._context, self._batch.fill(batch)))
        llama_cpp.llama_synchronize(self._context)
        if outcome is DecodeOutcome.OK:
            self._memory.after_decode(batch)
        return outcome

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary], a view of llama.cpp's own buffer."""
        pointer = llama_cpp.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        assert address, "the last forward pass had no outputs"
        if address != self._logits_address or rows > len(self._logits):
            # The buffer has room for n_seq_max rows at least, and never shrinks.
            shape = (max(rows, self.capacity.max_sequences), self.vocabulary.size)
            self._logits = np.ctypeslib.as_array(pointer, shape)
            self._logits_address = address
        return self._logits[:rows]

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of the sequence are in memory."""
        return self._memory.length(sequence_id)

    def trim(self, sequence_id: int, length: int) -> bool:
        """Call llama_memory_seq_rm to the end."""
        return self._memory.trim(sequence_id, length)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Call llama_memory_seq_cp."""
        self._memory.copy(source_id, destination_id, length)

    def save(self, sequence_id: int, start: int, most_bytes: int) -> State | None:
        """Call llama_state_seq_get_data."""
        return self._memory.save(sequence_id, start, most_bytes)

    def restore(self, sequence_id: int, state: State, prefix: Prefix | None) -> bool:
        """Call llama_state_seq_set_data."""
        return self._memory.restore(sequence_id, state, prefix)

    def embed(self, tokens: Sequence[int]) -> Floats | None:
        """Embed in the second context."""
        assert self._embedder is not None, "embeddings are not served"
        return self._embedder.embed(tokens)

    def close(self) -> None:
        """Free the contexts, then the model."""
        if self._embedder is not None:
            self._embedder.close()
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

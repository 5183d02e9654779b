"""A llama_batch over numpy arrays. Filling it takes five array copies instead of five ctypes stores per token."""

import ctypes
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.backends.base import TokenBatch


class LlamaBatch:
    """A batch of up to ``capacity`` tokens, each of which belongs to one sequence."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._sequence_ids = np.zeros(capacity, np.int32)
        self._outputs = np.zeros(capacity, np.int8)
        self._sequence_counts = np.ones(capacity, np.int32)
        # llama.cpp takes a pointer to the sequence ids of each token: each pointer is into the array above.
        self._pointers = self._sequence_ids.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        batch = llama_cpp.llama_batch()
        batch.token = _pointer(self._tokens, type(batch.token))
        batch.pos = _pointer(self._positions, type(batch.pos))
        batch.n_seq_id = _pointer(self._sequence_counts, type(batch.n_seq_id))
        batch.seq_id = _pointer(self._pointers, type(batch.seq_id))
        batch.logits = _pointer(self._outputs, type(batch.logits))
        self._batch = batch

    def fill(self, batch: TokenBatch) -> Any:
        """Return the struct for llama_decode; valid until the next call."""
        count = len(batch.tokens)
        # More than n_batch tokens would abort the process inside llama.cpp.
        assert 0 < count <= self._capacity, f"{count} tokens for a batch of {self._capacity}"
        self._tokens[:count] = batch.tokens
        self._positions[:count] = batch.positions
        self._sequence_ids[:count] = batch.sequence_ids
        self._outputs[:count] = batch.outputs
        self._batch.n_tokens = count
        return self._batch


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, kind)

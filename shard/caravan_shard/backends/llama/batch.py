"""The arrays of a forward pass as llama.cpp reads them, and what it says of the pass."""

import ctypes
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import Floats, Ids
from caravan_shard.backends.base import DecodeOutcome, TokenBatch


class LlamaBatch:
    """A batch of up to ``capacity`` tokens or embeddings, each of which belongs to one sequence."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._sequence_ids = np.zeros(capacity, np.int32)
        self._outputs = np.zeros(capacity, np.int8)
        self._sequence_counts = np.ones(capacity, np.int32)
        # llama.cpp takes a pointer to the sequence ids of each token: each pointer is into the array above.
        self._pointers = self._sequence_ids.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self._batch = self._new_batch()
        self._batch.token = _pointer(self._tokens, type(self._batch.token))
        self._batch.pos = _pointer(self._positions, type(self._batch.pos))
        # Made when a batch has embeddings.
        self._media_batch = self._new_batch()
        self._planes: Ids = np.empty(0, np.int32)
        self._embeddings: Floats = np.empty(0, np.float32)

    def _new_batch(self) -> Any:
        batch = llama_cpp.llama_batch()
        batch.n_seq_id = _pointer(self._sequence_counts, type(batch.n_seq_id))
        batch.seq_id = _pointer(self._pointers, type(batch.seq_id))
        batch.logits = _pointer(self._outputs, type(batch.logits))
        return batch

    def fill(self, batch: TokenBatch, positions: Ids, states: Floats | None = None) -> Any:
        """Return the struct for llama_decode; valid until the next call. ``positions``: those of the rows.

        ``states`` [rows, size]: the hidden states that a head reads with the tokens; all calls have them, or none.
        """
        count = self._fill_rows(batch)
        self._tokens[:count] = batch.tokens
        self._positions[:count] = positions
        self._batch.n_tokens = count
        if states is not None:
            self._embeddings = np.ascontiguousarray(states)
            self._batch.embd = _pointer(self._embeddings, type(self._batch.embd))
        return self._batch

    def fill_media(self, batch: TokenBatch, planes: Ids, embeddings: Floats) -> Any:
        """Return the struct for rows with ``embeddings`` [rows, size]. ``planes``: [dimensions, rows] of positions."""
        self._media_batch.n_tokens = self._fill_rows(batch)
        self._planes, self._embeddings = np.ascontiguousarray(planes), np.ascontiguousarray(embeddings)
        self._media_batch.pos = _pointer(self._planes, type(self._media_batch.pos))
        self._media_batch.embd = _pointer(self._embeddings, type(self._media_batch.embd))
        return self._media_batch

    def _fill_rows(self, batch: TokenBatch) -> int:
        """Write what rows of both kinds have, and return how many there are."""
        count = len(batch.tokens)
        # More than n_batch tokens would abort the process inside llama.cpp.
        assert 0 < count <= self._capacity, f"{count} tokens for a batch of {self._capacity}"
        self._sequence_ids[:count] = batch.sequence_ids
        self._outputs[:count] = batch.outputs
        return count


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, kind)


def outcome_of(code: int) -> DecodeOutcome:
    """Return what a value of llama_decode means."""
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

"""Repetition, frequency and presence penalties, applied only to tokens that have occurred."""

from collections.abc import Iterable

import numpy as np

from caravan_shard.arrays import Floats, Ids
from caravan_shard.sampling.parameters import SamplingParameters


class PenaltyCounts:
    """The distinct tokens of one sequence and how often each occurs in its output.

    The arrays double when full, so that `apply` costs the number of distinct tokens and no Python loop.
    """

    __slots__ = ("_counts", "_ids", "_index", "_size")

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids: Ids = np.empty(256, np.int32)
        self._counts: Floats = np.zeros(256, np.float32)
        self._size = 0

    def add(self, tokens: Iterable[int], *, output: bool) -> None:
        """Count tokens of the prompt or of the output."""
        for token in tokens:
            index = self._index.get(token)
            if index is None:
                index = self._append(token)
            if output:
                self._counts[index] += 1

    def _append(self, token: int) -> int:
        index = self._size
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        self._index[token] = index
        self._size = index + 1
        return index

    def apply(self, logits: Floats, parameters: SamplingParameters) -> None:
        """Change ``logits`` [vocabulary] in place."""
        ids = self._ids[: self._size]
        counts = self._counts[: self._size]
        touched: Floats = logits[ids]
        if parameters.repetition_penalty != 1.0:
            penalty = np.float32(parameters.repetition_penalty)
            touched = np.where(touched > 0, touched / penalty, touched * penalty).astype(np.float32)
        if parameters.frequency_penalty != 0.0 or parameters.presence_penalty != 0.0:
            touched -= counts * np.float32(parameters.frequency_penalty)
            touched -= (counts > 0) * np.float32(parameters.presence_penalty)
        logits[ids] = touched

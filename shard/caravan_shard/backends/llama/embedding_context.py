"""A llama.cpp context that embeds texts, over the weights of a model that others use, too."""

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.llama.batch import LlamaBatch
from caravan_shard.backends.llama.pooling import Pooling


class EmbeddingContext:
    """Computes texts, for which only one thread at a time may call it. Other contexts may compute meanwhile."""

    def __init__(self, pointer: Any, pass_tokens: int, pooling: Pooling) -> None:
        """Take over ``pointer``, a llama_context with room for ``pass_tokens`` tokens."""
        self._context = pointer
        self._pooling = pooling
        # NULL for BERT and its like.
        self._memory = llama_cpp.llama_get_memory(pointer)
        self._batch = LlamaBatch(pass_tokens)

    def embed(self, texts: Sequence[Sequence[int]]) -> list[Floats | None]:
        """Embed texts in one forward pass, see `LlamaEmbedder.embed`."""
        vectors = self._pass(texts)
        if len(texts) > 1:
            # A text without a vector may have spoiled those of others: no number times zero is no number.
            for place, vector in enumerate(vectors):
                if vector is None:
                    (vectors[place],) = self._pass([texts[place]])
        return vectors

    def _pass(self, texts: Sequence[Sequence[int]]) -> list[Floats | None]:
        lengths = [len(text) for text in texts]
        batch = TokenBatch(
            np.concatenate([np.array(text, np.int32) for text in texts]),
            np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            np.repeat(np.arange(len(texts), dtype=np.int32), lengths),
            self._pooling.outputs(lengths),
        )
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, False)
        if llama_cpp.llama_decode(self._context, self._batch.fill(batch, batch.positions)) != 0:
            return [None] * len(texts)
        return self._pooling.results(self._context, lengths)

    def close(self) -> None:
        """Free the context, not the model."""
        llama_cpp.llama_free(self._context)

"""Embeddings, in a second llama.cpp context over the same weights: pooling is fixed for a context."""

import math
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import ModelFacts, StartupError, TokenBatch
from caravan_shard.backends.llama.batch import LlamaBatch
from caravan_shard.backends.llama.context import FLASH_ATTENTION
from caravan_shard.backends.llama.metadata import metadata_text
from caravan_shard.config import ShardConfig

# The graphs of these architectures end with a softmax over "yes" and "no".
_RANKS_BY_SOFTMAX = frozenset({"qwen3", "qwen3vl"})
_MEAN: int = llama_cpp.LLAMA_POOLING_TYPE_MEAN
_RANK: int = llama_cpp.LLAMA_POOLING_TYPE_RANK
_POOLINGS: dict[str, int] = {
    "mean": _MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}


class LlamaEmbedder:
    """Embeds one text at a time, or says how relevant a document is, if the model ranks. No adapter applies.

    A text goes into one ubatch as a whole, because the mean needs all of its tokens there.
    """

    def __init__(self, model: Any, config: ShardConfig, facts: ModelFacts) -> None:
        """Make the context and warm it up; raises StartupError.

        llama.cpp also computes the logits of every token, which nobody reads, and keeps them twice:
        2 x ``max_tokens`` x vocabulary x 4 bytes.
        """
        pooling = _pooling(model, config, facts)
        self.ranks = pooling == _RANK
        self._is_probability = facts.architecture in _RANKS_BY_SOFTMAX
        self.size = 0 if self.ranks else int(llama_cpp.llama_model_n_embd_out(model))
        self.max_tokens = min(config.ubatch_size, config.batch_size, facts.trained_context or config.ubatch_size)
        self._context = llama_cpp.llama_init_from_model(model, self._parameters(config, pooling))
        if not self._context:
            raise StartupError(
                f"llama.cpp cannot make a context of {self.max_tokens} cells for --embeddings: pass a smaller -ub; "
                "see --log-level debug"
            )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = LlamaBatch(self.max_tokens)
        if self.embed([0]) is None:
            self.close()
            raise StartupError("the first forward pass for --embeddings failed; see --log-level debug")

    def _parameters(self, config: ShardConfig, pooling: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = self.max_tokens
        parameters.n_seq_max = 1
        parameters.embeddings = True
        parameters.pooling_type = pooling
        parameters.n_threads = config.decode_threads
        parameters.n_threads_batch = config.batch_threads
        parameters.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
        parameters.offload_kqv = True
        parameters.no_perf = True
        return parameters

    def embed(self, tokens: Sequence[int]) -> Floats | None:
        """Return the embedding [size], of Euclidean length 1, or the relevance [1] if the model ranks.

        None if the forward pass failed or gave a zero vector or no number.
        """
        count = len(tokens)
        batch = TokenBatch(
            np.array(tokens, np.int32),
            np.arange(count, dtype=np.int32),
            np.zeros(count, np.int32),
            np.ones(count, np.int8),
        )
        llama_cpp.llama_memory_clear(self._memory, False)
        if llama_cpp.llama_decode(self._context, self._batch.fill(batch)) != 0:
            return None
        pointer = llama_cpp.llama_get_embeddings_seq(self._context, 0)
        if not pointer:
            return None
        if self.ranks:
            return self._relevance(float(pointer[0]))
        vector = np.ctypeslib.as_array(pointer, (self.size,)).astype(np.float64)
        length = np.linalg.norm(vector)
        return (vector / length).astype(np.float32) if 0 < length < np.inf else None

    def _relevance(self, output: float) -> Floats | None:
        """Return [1]. As in vLLM, an output without a range gets one by the logistic function."""
        if not math.isfinite(output):
            return None
        return np.array([output if self._is_probability else 0.5 + 0.5 * math.tanh(0.5 * output)], np.float32)

    def close(self) -> None:
        """Free the context, not the model."""
        llama_cpp.llama_free(self._context)


def _pooling(model: Any, config: ShardConfig, facts: ModelFacts) -> int:
    if config.pooling != "model":
        return _POOLINGS[config.pooling]
    pooling = metadata_text(model, f"{facts.architecture}.pooling_type")
    return (int(pooling) if pooling.isdecimal() else 0) or _MEAN

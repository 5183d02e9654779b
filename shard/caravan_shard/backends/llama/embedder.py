"""Embeddings, in a llama.cpp context of their own over the same weights: pooling is fixed for a context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import JointEmbed, StartupError, TokenBatch
from caravan_shard.backends.llama.batch import LlamaBatch
from caravan_shard.backends.llama.context import FLASH_ATTENTION
from caravan_shard.backends.llama.metadata import metadata_text
from caravan_shard.backends.llama.rope import set_rope
from caravan_shard.config import ShardConfig

# The graphs of these architectures end with a softmax over "yes" and "no".
_RANKS_BY_SOFTMAX = frozenset({"qwen3", "qwen3vl"})
# Most texts in one forward pass. llama.cpp checks each call against all sequence ids that there are.
_MOST_TEXTS = 64
# Most tokens of texts that share a forward pass. More would gain little: with so many, the weights are read once for
# several texts already, while the attention of a pass runs over all pairs of its tokens, whichever text they are from.
_JOINT_TOKENS = 512
# The same for a model that also generates: a prompt that comes meanwhile waits for the pass.
_JOINT_TOKENS_BESIDE_PROMPTS = 128
_MEAN: int = llama_cpp.LLAMA_POOLING_TYPE_MEAN
_RANK: int = llama_cpp.LLAMA_POOLING_TYPE_RANK
_POOLINGS: dict[str, int] = {
    "mean": _MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """What the context for embeddings has room for. ``pass_tokens``: of one forward pass."""

    pooling: int
    max_tokens: int
    joint: JointEmbed
    pass_tokens: int

    def parameters(self, config: ShardConfig) -> Any:
        """Return the ``llama_context_params``."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = self.pass_tokens
        parameters.n_seq_max = self.joint.texts
        # All texts share the cells. Otherwise each could have its share of them only.
        parameters.kv_unified = True
        parameters.embeddings = True
        parameters.pooling_type = self.pooling
        parameters.n_threads = config.decode_threads
        parameters.n_threads_batch = config.batch_threads
        parameters.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
        parameters.offload_kqv = True
        parameters.no_perf = True
        set_rope(config, parameters)
        return parameters


def plan_embedding(model: Any, config: ShardConfig, *, generates: bool) -> EmbeddingPlan:
    """Return what the context for embeddings should have room for. ``generates``: see `LlamaEmbedder`."""
    trained_context = int(llama_cpp.llama_model_n_ctx_train(model))
    most = min(config.ubatch_size, config.batch_size)
    max_tokens = min(most, config.longest_context(trained_context) or most)
    # llama.cpp computes the texts of a recurrent model one after another, and keeps a state for each.
    apart = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    joint_tokens = min(most, _JOINT_TOKENS_BESIDE_PROMPTS if generates else _JOINT_TOKENS)
    joint = JointEmbed(texts=1 if apart else min(_MOST_TEXTS, joint_tokens), tokens=joint_tokens)
    return EmbeddingPlan(
        pooling=_pooling(model, config),
        max_tokens=max_tokens,
        joint=joint,
        # llama.cpp ends the process if the room for tokens is no multiple of the most texts.
        pass_tokens=-(-max(max_tokens, joint_tokens) // joint.texts) * joint.texts,
    )


class LlamaEmbedder:
    """Embeds texts, or says how relevant documents are, if the model ranks. No adapter applies.

    A text goes into one ubatch as a whole, because the mean needs all of its tokens there.
    """

    def __init__(self, model: Any, config: ShardConfig, facts: ModelFile, *, generates: bool) -> None:
        """Make the context and warm it up; raises StartupError.

        If the model also ``generates``, llama.cpp computes the logits of every token, which nobody reads, and keeps
        them twice: 2 x tokens of a pass x vocabulary x 4 bytes.
        """
        plan = plan_embedding(model, config, generates=generates)
        self.ranks = plan.pooling == _RANK
        self._is_probability = facts.architecture in _RANKS_BY_SOFTMAX
        self.size = 0 if self.ranks else int(llama_cpp.llama_model_n_embd_out(model))
        self.max_tokens = plan.max_tokens
        self.joint = plan.joint
        self._context = llama_cpp.llama_init_from_model(model, plan.parameters(config))
        if not self._context:
            raise StartupError(
                f"llama.cpp cannot make a context of {plan.pass_tokens} cells for embeddings: pass a smaller -ub; "
                "see --log-level debug"
            )
        # NULL for BERT and its like.
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = LlamaBatch(plan.pass_tokens)
        if self.embed([[0]])[0] is None:
            self.close()
            raise StartupError("the first forward pass for embeddings failed; see --log-level debug")

    def embed(self, texts: Sequence[Sequence[int]]) -> list[Floats | None]:
        """Return the embedding [size] of each text, of Euclidean length 1, or the relevance [1] if the model ranks.

        None for a text whose forward pass failed or gave a zero vector or no number.
        """
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
            np.ones(sum(lengths), np.int8),
        )
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, False)
        if llama_cpp.llama_decode(self._context, self._batch.fill(batch, batch.positions)) != 0:
            return [None] * len(texts)
        return [self._vector(place) for place in range(len(texts))]

    def _vector(self, place: int) -> Floats | None:
        pointer = llama_cpp.llama_get_embeddings_seq(self._context, place)
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


def _pooling(model: Any, config: ShardConfig) -> int:
    if config.pooling != "model":
        return _POOLINGS[config.pooling]
    pooling = metadata_text(model, f"{metadata_text(model, 'general.architecture')}.pooling_type")
    return (int(pooling) if pooling.isdecimal() else 0) or _MEAN

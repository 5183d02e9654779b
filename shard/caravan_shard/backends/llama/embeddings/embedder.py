"""Embeddings, in llama.cpp contexts of their own over the same weights: pooling is fixed for a context."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.model import ModelFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import JointEmbed, TokenBatch
from caravan_shard.backends.llama.batch import LlamaBatch
from caravan_shard.backends.llama.embeddings.plan import EmbeddingPlan, plan_embedding
from caravan_shard.backends.llama.embeddings.pooling import OfStates, Pooling, Relevances, Vectors
from caravan_shard.backends.llama.kernels.hidden_states import HiddenStates
from caravan_shard.backends.llama.model.vocabulary import missing_of_pairs
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)

# The vectors by llama.cpp and by its states are alike if the cosine of their angle is at least this.
_ALIKE = 0.999


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


class LlamaEmbedder:
    """Embeds texts, or says how relevant documents are, if the model ranks. No adapter applies.

    A text goes into one ubatch as a whole, because the mean needs all of its tokens there.
    """

    def __init__(self, model: Any, config: ShardConfig, facts: ModelFile, *, generates: bool) -> None:
        """Make the contexts and warm them up; raises StartupError.

        If the model also ``generates``, llama.cpp computes the logits of every token, which nobody reads, and keeps
        them twice: 2 x tokens of a pass x vocabulary x 4 bytes. They are spared where the states before them can be
        taken, and are what llama.cpp makes vectors of.
        """
        plan = plan_embedding(model, config, generates=generates)
        self.ranks = plan.ranks
        has_template = bool(llama_cpp.llama_model_chat_template(model, b"rerank"))
        missing = missing_of_pairs(llama_cpp.llama_model_get_vocab(model))
        if self.ranks and not has_template and missing:
            raise StartupError(f"the pairs of {facts.name} need the {missing} token, which the file does not name")
        self.size = 0 if self.ranks else int(llama_cpp.llama_model_n_embd_out(model))
        self._architecture = facts.architecture
        # The first has all threads, the others are the lanes.
        self._contexts: list[EmbeddingContext] = []
        try:
            self._open(model, config, plan)
            if plan.by_states and not self._is_like_llama(model, config, plan):
                self.close()
                plan = replace(plan, by_states=False)
                self._open(model, config, plan)
        except StartupError:
            self.close()
            raise
        self.max_tokens = plan.max_tokens
        self.joint = plan.joint

    def _open(self, model: Any, config: ShardConfig, plan: EmbeddingPlan) -> None:
        for parameters in plan.contexts(config):
            self._contexts.append(self._opened(model, plan, parameters))

    def _opened(self, model: Any, plan: EmbeddingPlan, parameters: Any) -> EmbeddingContext:
        pooling: Pooling = Relevances(self._architecture) if self.ranks else Vectors(self.size)
        if plan.by_states:
            states = HiddenStates(plan.outputs, self.size)
            states.give_to(parameters)
            pooling = OfStates(states, of_last=plan.of_last)
        pointer = llama_cpp.llama_init_from_model(model, parameters)
        if not pointer:
            raise StartupError(
                f"llama.cpp cannot make a context of {parameters.n_batch} cells for embeddings: pass a smaller -ub; "
                "see --log-level debug"
            )
        context = EmbeddingContext(pointer, parameters.n_batch, pooling)
        if context.embed([plan.tried])[0] is None and not plan.by_states:
            context.close()
            raise StartupError("the first forward pass for embeddings failed; see --log-level debug")
        return context

    def _is_like_llama(self, model: Any, config: ShardConfig, plan: EmbeddingPlan) -> bool:
        """Whether vectors of states are those that llama.cpp makes, which depends on the graph of the architecture."""
        tokens = len(plan.tried)
        small = replace(plan, by_states=False, pass_tokens=tokens, joint=JointEmbed(texts=1, tokens=tokens))
        (parameters,) = small.contexts(config)
        context = self._opened(model, small, parameters)
        (expected,) = context.embed([plan.tried])
        context.close()
        (made,) = self.embed([plan.tried])
        is_like = made is not None and expected is not None and float(made @ expected) >= _ALIKE
        if not is_like:
            _log.info("embeddings of this architecture need logits", extra={"architecture": self._architecture})
        return is_like

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        """Return the embedding [size] of each text, of Euclidean length 1, or the relevance [1] if the model ranks.

        None for a text whose forward pass failed or gave a zero vector or no number. ``lane``: see `Backend.embed`.
        """
        return self._contexts[0 if lane is None else 1 + lane].embed(texts)

    def close(self) -> None:
        """Free the contexts, not the model."""
        while self._contexts:
            self._contexts.pop().close()

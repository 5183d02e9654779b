"""What the contexts for embeddings have room for, and how they pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

from caravan_shard.backends.base import JointEmbed
from caravan_shard.backends.llama.kernels.hidden_states import can_take_states
from caravan_shard.backends.llama.memory.context import FLASH_ATTENTION, set_rope
from caravan_shard.backends.llama.model.loading import metadata_text
from caravan_shard.config import ShardConfig

_TRIED = (0, 1, 2, 3)
# Most texts in one forward pass. llama.cpp checks each call against all sequence ids that there are.
_MOST_TEXTS = 64
# Most tokens of texts that share a forward pass. More would gain little: with so many, the weights are read once for
# several texts already, while the attention of a pass runs over all pairs of its tokens, whichever text they are from.
_JOINT_TOKENS = 512
# The same for a model that also generates, where a prompt that comes meanwhile waits for the pass, and for a lane: each
# of them should have about as much to do.
_SMALL_JOINT_TOKENS = 128
# Each takes the memory of a context. That of attention may grow with the square of the tokens of a pass, so longer
# texts are computed one at a time, by all threads, which have enough to do then.
_MOST_LANES = 16
_MOST_LANE_TOKENS = 512
_MEAN: int = llama_cpp.LLAMA_POOLING_TYPE_MEAN
_RANK: int = llama_cpp.LLAMA_POOLING_TYPE_RANK
_LAST: int = llama_cpp.LLAMA_POOLING_TYPE_LAST
_POOLINGS: dict[str, int] = {"mean": _MEAN, "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS, "last": _LAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingPlan:
    """What the contexts for embeddings have room for. ``pass_tokens``: of one forward pass.

    ``by_states``: llama.cpp does not pool, and its logits are spared.
    """

    pooling: int
    max_tokens: int
    joint: JointEmbed
    pass_tokens: int
    by_states: bool

    @property
    def tried(self) -> Sequence[int]:
        """The text of the first passes, as far as it fits."""
        return _TRIED[: self.max_tokens]

    @property
    def ranks(self) -> bool:
        """Whether pairs get a relevance instead of texts a vector."""
        return self.pooling == _RANK

    @property
    def of_last(self) -> bool:
        """Whether the state of the last token is that of a text."""
        return self.pooling == _LAST

    @property
    def outputs(self) -> int:
        """Most outputs of a pass, if it is ``by_states``."""
        return self.joint.texts if self.of_last else self.pass_tokens

    def contexts(self, config: ShardConfig) -> list[Any]:
        """Return the ``llama_context_params`` of the context that has all threads, and of each lane."""
        lanes = self.joint.lanes if self.joint.lanes > 1 else 0
        return [
            self._parameters(config, config.batch_threads, self.pass_tokens),
            *(self._parameters(config, config.batch_threads // lanes, self.joint.lane_tokens) for _ in range(lanes)),
        ]

    def _parameters(self, config: ShardConfig, threads: int, pass_tokens: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = pass_tokens
        parameters.n_seq_max = self.joint.texts
        # All texts share the cells. Otherwise each could have its share of them only.
        parameters.kv_unified = True
        parameters.embeddings = not self.by_states
        if self.by_states:
            parameters.n_outputs_max = self.outputs
        parameters.pooling_type = self.pooling
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
        parameters.offload_kqv = True
        parameters.no_perf = True
        set_rope(config, parameters)
        return parameters


def plan_embedding(model: Any, config: ShardConfig, *, generates: bool) -> EmbeddingPlan:
    """Return what the contexts for embeddings should have room for. ``generates``: see `LlamaEmbedder`."""
    trained_context = int(llama_cpp.llama_model_n_ctx_train(model))
    most = min(config.ubatch_size, config.batch_size)
    max_tokens = min(most, config.longest_context(trained_context) or most)
    # llama.cpp computes the texts of a recurrent model one after another, and keeps a state for each.
    apart = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    lanes = _lanes(config, generates=generates)
    joint_tokens = min(most, _SMALL_JOINT_TOKENS if generates or lanes > 1 else _JOINT_TOKENS)
    texts = 1 if apart else min(_MOST_TEXTS, joint_tokens)
    # llama.cpp ends the process if the room for tokens is no multiple of the most texts.
    pass_tokens = -(-max(max_tokens, joint_tokens) // texts) * texts
    pooling = _pooling(model, config)
    return EmbeddingPlan(
        pooling=pooling,
        max_tokens=max_tokens,
        joint=JointEmbed(
            texts=texts,
            tokens=joint_tokens,
            lanes=lanes,
            lane_tokens=min(pass_tokens, _MOST_LANE_TOKENS // texts * texts),
        ),
        pass_tokens=pass_tokens,
        by_states=generates and pooling in {_MEAN, _LAST} and can_take_states(),
    )


def _lanes(config: ShardConfig, *, generates: bool) -> int:
    """Return how many texts are computed side by side where several wait."""
    return 1 if generates or config.uses_gpus else min(_MOST_LANES, config.batch_threads)


def _pooling(model: Any, config: ShardConfig) -> int:
    if config.pooling != "model":
        return _POOLINGS[config.pooling]
    pooling = metadata_text(model, f"{metadata_text(model, 'general.architecture')}.pooling_type")
    return (int(pooling) if pooling.isdecimal() else 0) or _MEAN

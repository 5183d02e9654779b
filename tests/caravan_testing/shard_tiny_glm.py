"""Writes a mixture of experts with random weights and a head that drafts, as GLM 4.5 has them: all layers attend."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

from caravan_testing.shard_tiny_mamba import TOKENS, TYPES
from caravan_testing.tiny_heads import Heads
from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, finish, write_weights

_CONTEXT = 8192


@dataclass(frozen=True, kw_only=True)
class GlmShape:
    """``dense``: how many of the first layers are no mixture of experts; the head always is one.

    ``expert``: dimensions inside of an expert. ``is_quantised``: the file has Q4_0, which is written for large models.
    """

    embedding: int = 64
    layers: int = 3
    dense: int = 1
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 128
    experts: int = 4
    used: int = 2
    expert: int = 64
    is_quantised: bool = False

    @property
    def head(self) -> int:
        """Dimensions of a head of attention."""
        return self.embedding // self.heads


def write_tiny_glm(path: Path, tokenizer_of: Path, heads: Heads, shape: GlmShape | None = None) -> Path:
    """Write a GGUF of the architecture glm4moe, with the tokenizer and template of another; always the same."""
    shape = shape or GlmShape()
    writer = _begun(path, shape)
    tokens = copy_tokenizer(tokenizer_of, writer)
    drawn = RandomWeights(29)
    tensors = {
        "token_embd.weight": drawn(tokens, shape.embedding),
        "output.weight": drawn(tokens, shape.embedding, scale=8.0),
    }
    _finish(writer, shape, heads, tensors, drawn)
    return path


def write_chain_glm(path: Path, words: int, heads: Heads, shape: GlmShape, peak: float = 100.0) -> Path:
    """Write a GGUF whose tokens are those of bytes and ``words`` others, each of which is followed by another one.

    The most probable text repeats nothing before it has all words, and rounding cannot change it. ``peak``: the logit
    of the word that follows; those of others have a standard deviation of this by the square root of the embedding.
    """
    writer = _begun(path, shape)
    tokens = len(TOKENS) + words
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*TOKENS, *(f" w{word}" for word in range(words))])
    writer.add_token_scores([0.0] * len(TOKENS) + [-1e6] * words)
    writer.add_token_types([*TYPES, *[TokenType.NORMAL] * words])
    drawn = RandomWeights(29)
    embedding = drawn(tokens, shape.embedding)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    output = np.zeros((tokens, shape.embedding))
    order = len(TOKENS) + np.random.default_rng(31).permutation(words)
    output[np.roll(order, -1)] = peak / np.sqrt(shape.embedding) * embedding[order]
    _finish(writer, shape, heads, {"token_embd.weight": embedding, "output.weight": output}, drawn)
    return path


def _begun(path: Path, shape: GlmShape) -> GGUFWriter:
    writer = GGUFWriter(path, "glm4moe")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.embedding)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_block_count(shape.layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_rope_dimension_count(shape.head)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(shape.expert)
    writer.add_leading_dense_block_count(shape.dense)
    writer.add_layer_norm_rms_eps(1e-6)
    return writer


def _finish(
    writer: GGUFWriter, shape: GlmShape, heads: Heads, tensors: dict[str, Weights], drawn: RandomWeights
) -> None:
    tensors["output_norm.weight"] = np.ones(shape.embedding)
    for layer in range(shape.layers):
        block = _attention(drawn, shape) | (
            _feed_forward(drawn, shape) if layer < shape.dense else _experts(drawn, shape)
        )
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    tensors = heads.added(tensors, shape.layers, _attention(drawn, shape) | _experts(drawn, shape), drawn)
    if shape.is_quantised:
        _add_quantised(writer, tensors)
        finish(writer)
    else:
        write_weights(writer, tensors)


def _add_quantised(writer: GGUFWriter, tensors: Mapping[str, Weights]) -> None:
    """Add matrices in Q4_0; a few small ones stay as they are."""
    for name, tensor in tensors.items():
        numbers = tensor.astype(np.float32)
        if numbers.ndim < 2 or "ffn_gate_inp" in name:
            writer.add_tensor(name, numbers)
        else:
            kind = GGMLQuantizationType.Q4_0
            writer.add_tensor(name, quantize(numbers, kind), raw_dtype=kind)


def _attention(drawn: RandomWeights, shape: GlmShape) -> dict[str, Weights]:
    size, queries, keys = shape.embedding, shape.heads * shape.head, shape.kv_heads * shape.head
    return {
        "attn_norm.weight": np.ones(size),
        "post_attention_norm.weight": np.ones(size),
        "attn_q.weight": drawn(queries, size),
        "attn_k.weight": drawn(keys, size),
        "attn_v.weight": drawn(keys, size, scale=2.0),
        "attn_output.weight": drawn(size, queries, scale=4.0),
    }


def _feed_forward(drawn: RandomWeights, shape: GlmShape) -> dict[str, Weights]:
    return {
        "ffn_gate.weight": drawn(shape.feed_forward, shape.embedding),
        "ffn_up.weight": drawn(shape.feed_forward, shape.embedding),
        "ffn_down.weight": drawn(shape.embedding, shape.feed_forward),
    }


def _experts(drawn: RandomWeights, shape: GlmShape) -> dict[str, Weights]:
    count, size, inner = shape.experts, shape.embedding, shape.expert
    return {
        "ffn_gate_inp.weight": drawn(count, size),
        "exp_probs_b.bias": np.zeros(count),
        "ffn_gate_exps.weight": drawn(count, inner, size),
        "ffn_up_exps.weight": drawn(count, inner, size),
        "ffn_down_exps.weight": drawn(count, size, inner),
        "ffn_gate_shexp.weight": drawn(inner, size),
        "ffn_up_shexp.weight": drawn(inner, size),
        "ffn_down_shexp.weight": drawn(size, inner),
    }

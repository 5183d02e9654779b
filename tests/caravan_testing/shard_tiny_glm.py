"""Writes a mixture of experts with random weights and a head that drafts, as GLM 4.5 has them: all layers attend."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan_testing.tiny_heads import Heads
from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 3, 4, 2, 128, 8192
_HEAD = _EMBEDDING // _HEADS
_EXPERTS, _USED, _EXPERT = 4, 2, 64


def write_tiny_glm(path: Path, tokenizer_of: Path, heads: Heads) -> Path:
    """Write a GGUF of the architecture glm4moe, with the tokenizer and template of another; always the same."""
    writer = GGUFWriter(path, "glm4moe")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_block_count(_LAYERS + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(_USED)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(_EXPERT)
    writer.add_leading_dense_block_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    drawn = RandomWeights(29)
    tokens = copy_tokenizer(tokenizer_of, writer)
    tensors = {
        "token_embd.weight": drawn(tokens, _EMBEDDING),
        "output.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = _attention(drawn) | (_experts(drawn) if layer else _feed_forward(drawn))
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    write_weights(writer, heads.added(tensors, _LAYERS, _attention(drawn) | _experts(drawn), drawn))
    return path


def _attention(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        "attn_norm.weight": np.ones(_EMBEDDING),
        "post_attention_norm.weight": np.ones(_EMBEDDING),
        "attn_q.weight": drawn(_HEADS * _HEAD, _EMBEDDING),
        "attn_k.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
        "attn_v.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING, scale=2.0),
        "attn_output.weight": drawn(_EMBEDDING, _HEADS * _HEAD, scale=4.0),
    }


def _feed_forward(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
        "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
        "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
    }


def _experts(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        "ffn_gate_inp.weight": drawn(_EXPERTS, _EMBEDDING),
        "exp_probs_b.bias": np.zeros(_EXPERTS),
        "ffn_gate_exps.weight": drawn(_EXPERTS, _EXPERT, _EMBEDDING),
        "ffn_up_exps.weight": drawn(_EXPERTS, _EXPERT, _EMBEDDING),
        "ffn_down_exps.weight": drawn(_EXPERTS, _EMBEDDING, _EXPERT),
        "ffn_gate_shexp.weight": drawn(_EXPERT, _EMBEDDING),
        "ffn_up_shexp.weight": drawn(_EXPERT, _EMBEDDING),
        "ffn_down_shexp.weight": drawn(_EMBEDDING, _EXPERT),
    }

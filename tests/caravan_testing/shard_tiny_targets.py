"""Writes models of architectures for which there are EAGLE-3 heads. Their layers write next to nothing."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _CONTEXT = 64, 4, 4, 2, 4096
_HEAD = _EMBEDDING // _HEADS
_EXPERTS, _USED, _EXPERT, _WINDOW = 4, 2, 64, 64
# How much the layers write.
_TRUNK = 0.0003


def write_tiny_target(path: Path, architecture: str, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture qwen3, qwen3moe or gpt-oss, with the tokenizer and template of another."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_EXPERT)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_block_count(_LAYERS)
    writer.add_layer_norm_rms_eps(1e-6)
    if architecture != "qwen3":
        writer.add_expert_count(_EXPERTS)
        writer.add_expert_used_count(_USED)
        writer.add_expert_feed_forward_length(_EXPERT)
    if architecture == "gpt-oss":
        writer.add_sliding_window(_WINDOW)
    drawn = RandomWeights(37)
    tokens = copy_tokenizer(tokenizer_of, writer)
    tensors = {
        "token_embd.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "output.weight": drawn(tokens, _EMBEDDING, scale=2.0),
        "output_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = _attention(drawn) | _OTHERS[architecture](drawn)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    write_weights(writer, tensors)
    return path


def _attention(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        "attn_norm.weight": np.ones(_EMBEDDING),
        "attn_q.weight": drawn(_HEADS * _HEAD, _EMBEDDING),
        "attn_k.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
        "attn_v.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
        "attn_output.weight": drawn(_EMBEDDING, _HEADS * _HEAD, scale=_TRUNK),
    }


def _experts(drawn: RandomWeights) -> dict[str, Weights]:
    return {
        "ffn_gate_inp.weight": drawn(_EXPERTS, _EMBEDDING),
        "ffn_gate_exps.weight": drawn(_EXPERTS, _EXPERT, _EMBEDDING),
        "ffn_up_exps.weight": drawn(_EXPERTS, _EXPERT, _EMBEDDING),
        "ffn_down_exps.weight": drawn(_EXPERTS, _EMBEDDING, _EXPERT, scale=_TRUNK),
    }


def _of_qwen() -> dict[str, Weights]:
    return {
        "attn_q_norm.weight": np.ones(_HEAD),
        "attn_k_norm.weight": np.ones(_HEAD),
        "ffn_norm.weight": np.ones(_EMBEDDING),
    }


def _qwen3(drawn: RandomWeights) -> dict[str, Weights]:
    return _of_qwen() | {
        "ffn_gate.weight": drawn(_EXPERT, _EMBEDDING),
        "ffn_up.weight": drawn(_EXPERT, _EMBEDDING),
        "ffn_down.weight": drawn(_EMBEDDING, _EXPERT, scale=_TRUNK),
    }


def _qwen3moe(drawn: RandomWeights) -> dict[str, Weights]:
    return _of_qwen() | _experts(drawn)


def _gpt_oss(drawn: RandomWeights) -> dict[str, Weights]:
    return _experts(drawn) | {
        "post_attention_norm.weight": np.ones(_EMBEDDING),
        "attn_sinks.weight": drawn(_HEADS),
        "attn_output.bias": np.zeros(_EMBEDDING),
        "ffn_gate_inp.bias": np.zeros(_EXPERTS),
        "ffn_gate_exps.bias": np.zeros((_EXPERTS, _EXPERT)),
        "ffn_up_exps.bias": np.zeros((_EXPERTS, _EXPERT)),
        "ffn_down_exps.bias": np.zeros((_EXPERTS, _EMBEDDING)),
    }


_OTHERS = {"qwen3": _qwen3, "qwen3moe": _qwen3moe, "gpt-oss": _gpt_oss}

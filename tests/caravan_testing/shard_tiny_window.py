"""Writes a model with random weights of which every other layer attends to a window, as most of Gemma 3's do."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

WINDOW = 64
_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 2, 128, 8192
_HEAD = _EMBEDDING // _HEADS
# Layers of a window, one after another, and one that sees everything.
_PATTERN = 2


def write_tiny_window(path: Path, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture gemma3, with the tokenizer and template of another; always the same."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(_PATTERN)
    writer.add_layer_norm_rms_eps(1e-6)
    write_weights(writer, _tensors(copy_tokenizer(tokenizer_of, writer)))
    return path


def _tensors(tokens: int) -> dict[str, Weights]:
    drawn = RandomWeights(23)
    tensors = {
        "token_embd.weight": drawn(tokens, _EMBEDDING),
        "output.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": np.ones(_EMBEDDING),
            "post_attention_norm.weight": np.ones(_EMBEDDING),
            "attn_q.weight": drawn(_HEADS * _HEAD, _EMBEDDING),
            "attn_k.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
            "attn_v.weight": drawn(_KV_HEADS * _HEAD, _EMBEDDING),
            "attn_output.weight": drawn(_EMBEDDING, _HEADS * _HEAD),
            "attn_q_norm.weight": np.ones(_HEAD),
            "attn_k_norm.weight": np.ones(_HEAD),
            "ffn_norm.weight": np.ones(_EMBEDDING),
            "post_ffw_norm.weight": np.ones(_EMBEDDING),
            "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
        }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors

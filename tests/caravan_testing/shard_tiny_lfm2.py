"""Writes a hybrid model with random weights whose recurrent layers are short convolutions, as those of LFM2 are.

llama.cpp can take the last tokens of its recurrent layers back, if it was asked to keep what that needs.
"""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 2, 128, 8192
_CONVOLUTION = 3


def write_tiny_lfm2(path: Path, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture lfm2, with the tokenizer and template of another; always the same."""
    writer = GGUFWriter(path, "lfm2")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    # A layer without them is recurrent.
    writer.add_head_count_kv([0 if _is_recurrent(layer) else _KV_HEADS for layer in range(_LAYERS)])
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    writer.add_shortconv_l_cache(_CONVOLUTION)
    writer.add_layer_norm_rms_eps(1e-5)
    write_weights(writer, _tensors(copy_tokenizer(tokenizer_of, writer)))
    return path


def _is_recurrent(layer: int) -> bool:
    return layer % 2 == 0


def _tensors(tokens: int) -> dict[str, Weights]:
    drawn = RandomWeights(17)
    tensors = {
        "token_embd.weight": drawn(tokens, _EMBEDDING),
        "output.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "token_embd_norm.weight": np.ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": np.ones(_EMBEDDING),
            "ffn_norm.weight": np.ones(_EMBEDDING),
            "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
        }
        if _is_recurrent(layer):
            block |= {
                "shortconv.conv.weight": drawn(_EMBEDDING, _CONVOLUTION, scale=2.0),
                "shortconv.in_proj.weight": drawn(3 * _EMBEDDING, _EMBEDDING),
                "shortconv.out_proj.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0),
            }
        else:
            head = _EMBEDDING // _HEADS
            block |= {
                "attn_q.weight": drawn(_EMBEDDING, _EMBEDDING),
                "attn_k.weight": drawn(_KV_HEADS * head, _EMBEDDING),
                "attn_v.weight": drawn(_KV_HEADS * head, _EMBEDDING, scale=2.0),
                "attn_output.weight": drawn(_EMBEDDING, _EMBEDDING, scale=4.0),
                "attn_q_norm.weight": np.ones(head),
                "attn_k_norm.weight": np.ones(head),
            }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors

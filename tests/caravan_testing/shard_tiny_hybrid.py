"""Writes a hybrid model with random weights: every other layer is recurrent (Mamba-2), the others attend."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan_testing.tiny_weights import RandomWeights, Weights, copy_tokenizer, write_weights

_EMBEDDING, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 2, 128, 8192
_INNER, _STATE, _CONVOLUTION, _GROUPS, _STATE_HEADS = 128, 16, 4, 1, 4
_CONVOLVED = _INNER + 2 * _GROUPS * _STATE


def write_tiny_hybrid(path: Path, tokenizer_of: Path) -> Path:
    """Write a GGUF of the architecture granitehybrid, with the tokenizer and template of another; always the same."""
    writer = GGUFWriter(path, "granitehybrid")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    # A layer without them is recurrent.
    writer.add_head_count_kv([0 if _is_recurrent(layer) else _KV_HEADS for layer in range(_LAYERS)])
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    writer.add_ssm_conv_kernel(_CONVOLUTION)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_group_count(_GROUPS)
    writer.add_ssm_time_step_rank(_STATE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    write_weights(writer, _tensors(copy_tokenizer(tokenizer_of, writer)))
    return path


def _is_recurrent(layer: int) -> bool:
    return layer % 2 == 0


def _tensors(tokens: int) -> dict[str, Weights]:
    drawn = RandomWeights(13)
    tensors = {
        # The same matrix makes the logits.
        "token_embd.weight": drawn(tokens, _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING),
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
                "ssm_in.weight": drawn(_INNER + _CONVOLVED + _STATE_HEADS, _EMBEDDING),
                "ssm_conv1d.weight": drawn(_CONVOLVED, _CONVOLUTION, scale=2.0),
                "ssm_conv1d.bias": np.zeros(_CONVOLVED),
                "ssm_dt.bias": np.full(_STATE_HEADS, -1.0),
                # Slow decay: tokens of long ago still matter.
                "ssm_a": -np.arange(1.0, _STATE_HEADS + 1).reshape(_STATE_HEADS, 1) / 200,
                "ssm_d": np.full((_STATE_HEADS, 1), 0.1),
                "ssm_norm.weight": np.ones((_GROUPS, _INNER // _GROUPS)),
                "ssm_out.weight": drawn(_EMBEDDING, _INNER, scale=4.0),
            }
        else:
            of_keys = _KV_HEADS * _EMBEDDING // _HEADS
            block |= {
                "attn_q.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0),
                "attn_k.weight": drawn(of_keys, _EMBEDDING, scale=2.0),
                "attn_v.weight": drawn(of_keys, _EMBEDDING, scale=2.0),
                "attn_output.weight": drawn(_EMBEDDING, _EMBEDDING, scale=4.0),
            }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors

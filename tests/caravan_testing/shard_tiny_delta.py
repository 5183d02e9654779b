"""Writes a Qwen 3.5 with random weights: every other layer is recurrent, and positions have dimensions (M-RoPE)."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from caravan_testing.shard_tiny_mamba import TOKENS, TYPES

_EMBEDDING, _LAYERS, _HEADS, _HEAD, _FEED_FORWARD, _CONTEXT = 64, 4, 4, 16, 128, 4096
_STATE, _KEY_HEADS, _VALUE_HEADS, _CONVOLUTION = 16, 2, 4, 4
_INNER = _STATE * _VALUE_HEADS
_CONVOLVED = 2 * _STATE * _KEY_HEADS + _INNER


def write_tiny_delta(path: Path) -> Path:
    """Write a GGUF of half a megabyte with a vocabulary of bytes, the same one every time."""
    writer = GGUFWriter(path, "qwen35")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_sections((2, 3, 3, 0))
    writer.add_rope_dimension_count(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_uint32("qwen35.full_attention_interval", 2)
    writer.add_ssm_conv_kernel(_CONVOLUTION)
    writer.add_ssm_inner_size(_INNER)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_group_count(_KEY_HEADS)
    writer.add_ssm_time_step_rank(_VALUE_HEADS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TYPES)
    for name, tensor in _tensors().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(14)

    def drawn(*sizes: int, scale: float = 1.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float64] = scale * random.standard_normal(sizes) / np.sqrt(sizes[-1])
        return numbers.astype(np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    tensors = {
        "token_embd.weight": drawn(len(TOKENS), _EMBEDDING, scale=8.0),
        "output.weight": drawn(len(TOKENS), _EMBEDDING, scale=8.0),
        "output_norm.weight": ones(_EMBEDDING),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": ones(_EMBEDDING),
            "post_attention_norm.weight": ones(_EMBEDDING),
            "ffn_gate.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_up.weight": drawn(_FEED_FORWARD, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _FEED_FORWARD),
        }
        if layer % 2 == 0:
            block |= {
                "attn_qkv.weight": drawn(_CONVOLVED, _EMBEDDING),
                "attn_gate.weight": drawn(_INNER, _EMBEDDING),
                "ssm_conv1d.weight": drawn(_CONVOLVED, _CONVOLUTION, scale=2.0),
                "ssm_dt.bias": np.full(_VALUE_HEADS, -1.0, np.float32),
                # Slow decay: tokens of long ago still matter.
                "ssm_a": (-np.arange(1.0, _VALUE_HEADS + 1) / 50).astype(np.float32),
                "ssm_beta.weight": drawn(_VALUE_HEADS, _EMBEDDING),
                "ssm_alpha.weight": drawn(_VALUE_HEADS, _EMBEDDING),
                "ssm_norm.weight": ones(_STATE),
                "ssm_out.weight": drawn(_EMBEDDING, _INNER, scale=4.0),
            }
        else:
            block |= {
                # With a gate for each head.
                "attn_q.weight": drawn(2 * _HEADS * _HEAD, _EMBEDDING, scale=2.0),
                "attn_k.weight": drawn(_HEADS * _HEAD, _EMBEDDING, scale=2.0),
                "attn_v.weight": drawn(_HEADS * _HEAD, _EMBEDDING, scale=2.0),
                "attn_output.weight": drawn(_EMBEDDING, _HEADS * _HEAD, scale=4.0),
                "attn_q_norm.weight": ones(_HEAD),
                "attn_k_norm.weight": ones(_HEAD),
            }
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors

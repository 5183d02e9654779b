"""Writes a model whose positions have three dimensions (M-RoPE), as those of Qwen2-VL have, with random weights."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from caravan_testing.shard_tiny_mamba import TOKENS, TYPES
from caravan_testing.tiny_weights import write_weights

_EMBEDDING, _LAYERS, _HEADS, _INNER, _CONTEXT = 64, 2, 4, 128, 4096
# How many pairs of a head's dimensions turn with the time, the height and the width.
_SECTIONS = (2, 3, 3, 0)


def write_tiny_mrope(path: Path) -> Path:
    """Write a GGUF of half a megabyte with a vocabulary of bytes, the same one every time."""
    writer = GGUFWriter(path, "qwen2vl")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_block_count(_LAYERS)
    writer.add_rope_dimension_sections(_SECTIONS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types(TYPES)
    write_weights(writer, _tensors())
    return path


def _tensors() -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(11)

    def drawn(*sizes: int, scale: float = 1.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float64] = scale * random.standard_normal(sizes) / np.sqrt(sizes[-1])
        return numbers.astype(np.float32)

    tensors = {
        "token_embd.weight": drawn(len(TOKENS), _EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(_EMBEDDING, np.float32),
        "output.weight": drawn(len(TOKENS), _EMBEDDING, scale=8.0),
    }
    for layer in range(_LAYERS):
        block = {
            "attn_norm.weight": np.ones(_EMBEDDING, np.float32),
            "ffn_norm.weight": np.ones(_EMBEDDING, np.float32),
            "attn_output.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0),
            "ffn_gate.weight": drawn(_INNER, _EMBEDDING),
            "ffn_up.weight": drawn(_INNER, _EMBEDDING),
            "ffn_down.weight": drawn(_EMBEDDING, _INNER),
        }
        for part in ("attn_q", "attn_k", "attn_v"):
            block |= {f"{part}.weight": drawn(_EMBEDDING, _EMBEDDING, scale=2.0), f"{part}.bias": drawn(_EMBEDDING)}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors

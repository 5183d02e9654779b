"""Writes a gemma 3 with random weights, of whose layers all but the last attend to a window."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from caravan_testing.shard_tiny_mamba import TOKENS, TYPES

EMBEDDING = 64
WINDOW = 32
_LAYERS, _HEADS, _HEAD, _INNER, _CONTEXT = 6, 4, 16, 128, 2048


def write_tiny_gemma(path: Path) -> Path:
    """Write a GGUF of 1.3 MB with a vocabulary of bytes, the same one every time."""
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_block_count(_LAYERS)
    writer.add_sliding_window(WINDOW)
    writer.add_layer_norm_rms_eps(1e-6)
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
    random = np.random.default_rng(12)

    def drawn(*sizes: int, scale: float = 1.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float64] = scale * random.standard_normal(sizes) / np.sqrt(sizes[-1])
        return numbers.astype(np.float32)

    tensors = {
        "token_embd.weight": drawn(len(TOKENS), EMBEDDING),
        "output.weight": drawn(len(TOKENS), EMBEDDING, scale=8.0),
        "output_norm.weight": np.ones(EMBEDDING, np.float32),
    }
    inner = _HEADS * _HEAD
    sizes = {"attn_q": (inner, EMBEDDING), "attn_k": (inner, EMBEDDING), "attn_v": (inner, EMBEDDING)}
    sizes |= {"attn_output": (EMBEDDING, inner), "ffn_gate": (_INNER, EMBEDDING), "ffn_up": (_INNER, EMBEDDING)}
    sizes |= {"ffn_down": (EMBEDDING, _INNER)}
    norms = {
        "attn_norm": EMBEDDING,
        "post_attention_norm": EMBEDDING,
        "ffn_norm": EMBEDDING,
        "post_ffw_norm": EMBEDDING,
    }
    norms |= {"attn_q_norm": _HEAD, "attn_k_norm": _HEAD}
    for layer in range(_LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": drawn(*size) for name, size in sizes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    return tensors

"""Writes models whose steps take less than a millisecond: one layer, random weights, the vocabulary of a real model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from bench.tokenizer_of import add_tokenizer

_EMBEDDING, _HEADS, _INNER, _CONTEXT = 64, 4, 128, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """``tokenizer_of``: the model whose tokenizer it gets, filled up to ``tokens`` with tokens that no text has.

    ``spread``: the standard deviation of a step's logits. At 2 they are flat: hundreds of tokens are likely. At 8 they
    are peaked, as those of most steps of a real model are.
    """

    tokenizer_of: str
    tokens: int
    spread: float = 2.0


TINY = {
    "tiny-49k": Tiny(tokenizer_of="smollm2-q4_1", tokens=49_152),
    "tiny-49k-peaked": Tiny(tokenizer_of="smollm2-q4_1", tokens=49_152, spread=8.0),
    "tiny-152k": Tiny(tokenizer_of="smollm2-q4_1", tokens=151_936),
    "tiny-262k": Tiny(tokenizer_of="gemma-3-270m", tokens=262_144),
    "tiny-262k-peaked": Tiny(tokenizer_of="gemma-3-270m", tokens=262_144, spread=8.0),
}


def write_tiny(path: Path, tiny: Tiny, source: Path) -> Path:
    """Write the model with the tokenizer of the GGUF file ``source``, the same one every time; return ``path``."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_EMBEDDING)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_block_count(1)
    writer.add_rope_dimension_count(_EMBEDDING // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, source, tiny.tokens)
    for name, tensor in _tensors(tiny).items():
        if name == "token_embd.weight":
            writer.add_tensor(name, quantize(tensor, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(tiny: Tiny) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(7)

    def weights(rows: int, columns: int) -> NDArray[np.float32]:
        drawn: NDArray[np.float64] = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return drawn.astype(np.float32)

    # The same matrix makes the logits; what it is multiplied with has a length of sqrt(_EMBEDDING).
    return {
        "token_embd.weight": weights(tiny.tokens, _EMBEDDING) * np.float32(tiny.spread),
        "output_norm.weight": np.ones(_EMBEDDING, np.float32),
        "blk.0.attn_norm.weight": np.ones(_EMBEDDING, np.float32),
        "blk.0.attn_q.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.attn_k.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.attn_v.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.attn_output.weight": weights(_EMBEDDING, _EMBEDDING),
        "blk.0.ffn_norm.weight": np.ones(_EMBEDDING, np.float32),
        "blk.0.ffn_gate.weight": weights(_INNER, _EMBEDDING),
        "blk.0.ffn_up.weight": weights(_INNER, _EMBEDDING),
        "blk.0.ffn_down.weight": weights(_EMBEDDING, _INNER),
    }

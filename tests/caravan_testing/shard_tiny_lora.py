"""Writes LoRA adapters with random weights for the demo model. A seed gives the same file every time."""

from pathlib import Path

import numpy as np
from gguf import GGUFType, GGUFWriter, Keys

EMBEDDING, LAYERS = 576, 30
RANK, ALPHA = 4, 8.0


def write_tiny_lora(
    path: Path, seed: int, *, architecture: str = "llama", embedding: int = EMBEDDING, kind: str = "lora"
) -> Path:
    """Write a GGUF of half a megabyte that changes the queries and the outputs of attention."""
    writer = GGUFWriter(path, architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, kind)
    writer.add_float32(Keys.Adapter.LORA_ALPHA, ALPHA)
    random = np.random.default_rng(seed)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_output"):
            shapes = {"lora_a": (RANK, embedding), "lora_b": (EMBEDDING, RANK)}
            for side, shape in shapes.items():
                tensor = random.standard_normal(shape) / np.sqrt(shape[1])
                writer.add_tensor(f"blk.{layer}.{name}.weight.{side}", tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

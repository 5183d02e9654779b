"""Writes LoRA adapters with random weights. A seed gives the same file every time."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFType, GGUFWriter, Keys

RANK, ALPHA = 4, 8.0


@dataclass(frozen=True)
class Adapted:
    """How large the model is that an adapter is for: the demo model's numbers if nothing is given."""

    architecture: str = "llama"
    embedding: int = 576
    layers: int = 30


DEMO = Adapted()


def write_tiny_lora(
    path: Path, seed: int, model: Adapted = DEMO, *, inputs: int | None = None, kind: str = "lora"
) -> Path:
    """Write a GGUF that changes the queries and the outputs of attention; for the demo model it has half a megabyte.

    It fits the model unless ``inputs`` says that it takes vectors of another size.
    """
    writer = GGUFWriter(path, model.architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, kind)
    writer.add_float32(Keys.Adapter.LORA_ALPHA, ALPHA)
    random = np.random.default_rng(seed)
    for layer in range(model.layers):
        for name in ("attn_q", "attn_output"):
            shapes = {"lora_a": (RANK, inputs or model.embedding), "lora_b": (model.embedding, RANK)}
            for side, shape in shapes.items():
                tensor = random.standard_normal(shape) / np.sqrt(shape[1])
                writer.add_tensor(f"blk.{layer}.{name}.weight.{side}", tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

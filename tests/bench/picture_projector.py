"""Writes a projector of realistic cost: a vision transformer with random weights, whose answers mean nothing."""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.paths import DEMO_MODEL
from caravan_testing.spelling_projector import embeddings_of

# A picture is scaled to this side and read as 256 patches, each of them a token.
SIDE = 512
_WIDTH, _INNER, _HEADS, _PATCH = 768, 3072, 12, 32


def write_projector(path: Path, layers: int) -> None:
    """Write to ``path`` one of ``layers`` layers of the size of SigLIP's base model, for the demo model."""
    size = embeddings_of(DEMO_MODEL).shape[1]
    random = np.random.default_rng(0)

    def drawn(*sizes: int) -> NDArray[np.float16]:
        numbers: NDArray[np.float32] = random.standard_normal(sizes, np.float32) / np.sqrt(np.prod(sizes[1:]))
        return numbers.astype(np.float16)

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "janus_pro")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {"image_size": SIDE, "patch_size": _PATCH, "embedding_length": _WIDTH, "feed_forward_length": _INNER}
    numbers |= {"projection_dim": size, "block_count": layers, "attention.head_count": _HEADS}
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5] * 3)
    tensors: dict[str, NDArray[np.float16] | NDArray[np.float32]] = {
        "v.patch_embd.weight": drawn(_WIDTH, 3, _PATCH, _PATCH),
        "mm.0.weight": drawn(_WIDTH, _WIDTH),
        "mm.0.bias": np.zeros(_WIDTH, np.float32),
        "mm.1.weight": drawn(size, _WIDTH),
        "mm.1.bias": np.zeros(size, np.float32),
    }
    for block in (f"v.blk.{layer}" for layer in range(layers)):
        for norm in ("ln1", "ln2"):
            tensors[f"{block}.{norm}.weight"] = np.ones(_WIDTH, np.float32)
            tensors[f"{block}.{norm}.bias"] = np.zeros(_WIDTH, np.float32)
        tensors |= {f"{block}.attn_{name}.weight": drawn(_WIDTH, _WIDTH) for name in ("q", "k", "v", "out")}
        tensors |= {f"{block}.ffn_up.weight": drawn(_INNER, _WIDTH), f"{block}.ffn_down.weight": drawn(_WIDTH, _INNER)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

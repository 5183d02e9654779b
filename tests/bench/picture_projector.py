"""Writes a projector of realistic cost: a vision transformer with random weights, whose answers mean nothing."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.paths import DEMO_MODEL
from caravan_testing.random_projectors import write_vision
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
    sizes = {"embedding_length": _WIDTH, "feed_forward_length": _INNER, "attention.head_count": _HEADS}
    write_vision(path, "janus_pro", tensors, size, image=SIDE, patch=_PATCH, blocks=layers, **sizes)

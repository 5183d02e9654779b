"""Writes projectors with random weights: of pictures in a grid, of pictures whose size varies, of sound, and of gemma.

Each is the smallest that libmtmd takes of its kind.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from caravan_testing.spelling_projector import embeddings_of

_Tensors = Mapping[str, NDArray[np.float32] | NDArray[np.float16]]
_WIDTH, _INNER = 16, 32


def write_grid_projector(path: Path, size: int) -> Path:
    """Write one of Qwen2-VL, for a model with embeddings of ``size``: a cell for 16 x 16 pixels, 8 cells at least."""
    random = _Random(3)
    merged = 4 * _WIDTH
    tensors = {
        "v.patch_embd.weight": random.drawn(_WIDTH, 3, 8, 8),
        "v.patch_embd.weight.1": random.drawn(_WIDTH, 3, 8, 8),
        **random.layer("v.blk.0"),
        "mm.0.weight": random.drawn(merged, merged),
        "mm.0.bias": np.zeros(merged, np.float32),
        "mm.2.weight": random.drawn(size, merged, scale=8.0),
        "mm.2.bias": np.zeros(size, np.float32),
    }
    return write_vision(path, "qwen2vl_merger", tensors, size, image=64, patch=8, blocks=1)


def write_gemma_projector(path: Path, size: int) -> Path:
    """Write one of gemma 3: 16 cells, whatever the size of the picture, which see each other."""
    random = _Random(4)
    tensors = {
        "v.patch_embd.weight": random.drawn(_WIDTH, 3, 8, 8),
        "v.position_embd.weight": random.drawn(64, _WIDTH),
        "mm.input_projection.weight": random.drawn(_WIDTH, size, scale=8.0),
        "mm.soft_emb_norm.weight": np.ones(_WIDTH, np.float32),
    }
    return write_vision(path, "gemma3", tensors, size, image=64, patch=8, **{"projector.scale_factor": 2})


def write_varying_projector(path: Path, size: int) -> Path:
    """Write one of Phi-4: a cell for 16 x 16 pixels, within bounds; each cell sees those before it."""
    random = _Random(5)
    tensors = {
        "v.patch_embd.weight": random.drawn(_WIDTH, 3, 16, 16),
        "v.position_embd.weight": random.drawn(16, _WIDTH),
        "mm.0.weight": random.drawn(_INNER, _WIDTH),
        "mm.0.bias": np.zeros(_INNER, np.float32),
        "mm.2.weight": random.drawn(size, _INNER, scale=8.0),
        "mm.2.bias": np.zeros(size, np.float32),
    }
    pixels = {"image_min_pixels": 4 * 256, "image_max_pixels": 64 * 256}
    return write_vision(path, "phi4", tensors, size, image=64, patch=16, **pixels)


def write_marked_projector(path: Path, size: int) -> Path:
    """Write one of SmolVLM, which wants tokens around a picture that the vocabulary must have."""
    random = _Random(6)
    tensors = {
        "v.patch_embd.weight": random.drawn(_WIDTH, 3, 16, 16),
        "v.position_embd.weight": random.drawn(16, _WIDTH),
        "mm.model.fc.weight": random.drawn(size, 4 * _WIDTH),
    }
    numbers = {"projector.scale_factor": 2, "preproc_image_size": 128}
    return write_vision(path, "idefics3", tensors, size, image=64, patch=16, **numbers)


def write_placed_projector(path: Path, size: int) -> Path:
    """Write the header of one whose pictures have other tokens at another place."""
    return write_vision(path, "hunyuanvl", {"v.patch_embd.weight": np.ones((1, 1), np.float32)}, size, image=8, patch=8)


FRAME = 640


def write_sound_projector(path: Path, model: Path, token_ids: Sequence[int]) -> Path:
    """Write one of gemma 4 whose sound spells: a frame of `FRAME` samples with a pulse at n is the n-th of the ids."""
    embeddings = embeddings_of(model)[list(token_ids)]
    weights = np.zeros((embeddings.shape[1], FRAME), np.float32)
    # What a pulse is once the frame is normalised.
    weights[:, : len(token_ids)] = embeddings.T / np.sqrt(FRAME)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "gemma4ua")
    writer.add_bool("clip.has_audio_encoder", True)
    numbers = {
        "num_mel_bins": FRAME,
        "embedding_length": FRAME,
        "feed_forward_length": FRAME,
        "projection_dim": embeddings.shape[1],
        "block_count": 0,
        "attention.head_count": 1,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"clip.audio.{key}", number)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-6)
    _finish(writer, {"mm.a.input_projection.weight": weights})
    return path


def spelled_sound(token_ids: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the samples that spell ``tokens`` for a projector of ``token_ids``."""
    frames = np.zeros((len(tokens), FRAME), np.float32)
    frames[np.arange(len(tokens)), [token_ids.index(token) for token in tokens]] = 0.5
    return frames.reshape(-1)


def write_vision(
    path: Path, kind: str, tensors: _Tensors, size: int, *, image: int, patch: int, blocks: int = 0, **numbers: int
) -> Path:
    """Write one of pictures, of a ``kind`` of libmtmd's. ``size``: of its embeddings. ``numbers``: of its header."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", kind)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "image_size": image,
        "patch_size": patch,
        "embedding_length": _WIDTH,
        "feed_forward_length": _INNER,
        "projection_dim": size,
        "block_count": blocks,
        "attention.head_count": 1,
        **numbers,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    _finish(writer, tensors)
    return path


def _finish(writer: gguf.GGUFWriter, tensors: _Tensors) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _Random:
    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def drawn(self, *sizes: int, scale: float = 1.0) -> NDArray[np.float32]:
        numbers: NDArray[np.float64] = scale * self._random.standard_normal(sizes) / np.sqrt(np.prod(sizes[1:]))
        return numbers.astype(np.float32)

    def layer(self, name: str) -> dict[str, NDArray[np.float32]]:
        """Return a layer of a vision transformer."""
        tensors = {f"{name}.{norm}.weight": np.ones(_WIDTH, np.float32) for norm in ("ln1", "ln2")}
        sizes = {"attn_q": (_WIDTH, _WIDTH), "attn_k": (_WIDTH, _WIDTH), "attn_v": (_WIDTH, _WIDTH)}
        sizes |= {"attn_out": (_WIDTH, _WIDTH), "ffn_up": (_INNER, _WIDTH), "ffn_down": (_WIDTH, _INNER)}
        tensors |= {f"{name}.{key}.weight": self.drawn(*size) for key, size in sizes.items()}
        biases = {key: size[0] for key, size in sizes.items()} | {"ln1": _WIDTH, "ln2": _WIDTH}
        return tensors | {f"{name}.{key}.bias": np.zeros(size, np.float32) for key, size in biases.items()}

"""Writes projectors that spell, and projectors with random weights: for images in a grid or of any size, audio, gemma.

An image spells words where a patch has the very embedding of the token that it stands for: a prompt with it has the
logits of the prompt with its words. That is a projector of Janus-Pro without layers: a convolution that reads a patch
as bits, one unit for each token that recognises its bits, and the embeddings of these tokens. All numbers are powers of
two or copied, so that nothing is rounded. The others are the smallest that libmtmd takes of their kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_testing.gguf_file import tensors_of
from caravan_testing.media_prompts import MediaPrompt, Medium, media_prompt
from caravan_testing.shard_models import ModelDriver
from caravan_testing.shard_tiny_llama import write_tiny_llama

PATCH = 16
# Patches on a side of a picture; it has as many cells as patches.
SIDE = 4
CELLS = SIDE * SIDE
# The bits of a patch are the colours of its first row of blocks of 4 x 4 pixels.
_BLOCK = 4
_BITS = 12
_FOUND = 8.0


@dataclass(frozen=True)
class Speller:
    """Makes pictures for a projector that knows ``token_ids``."""

    token_ids: tuple[int, ...]

    def picture(self, tokens: Sequence[int]) -> NDArray[np.uint8]:
        """Return the pixels [height, width, 3] of a picture that spells `CELLS` tokens."""
        assert len(tokens) == CELLS, f"a picture spells {CELLS} tokens, not {len(tokens)}"
        pixels = np.zeros((SIDE * PATCH, SIDE * PATCH, 3), np.uint8)
        for place, token in enumerate(tokens):
            top, left = PATCH * (place // SIDE), PATCH * (place % SIDE)
            for bit, is_set in enumerate(_code(self.token_ids.index(token))):
                block = left + _BLOCK * (bit // 3)
                pixels[top : top + _BLOCK, block : block + _BLOCK, bit % 3] = 255 * is_set
        return pixels


def _code(number: int) -> list[int]:
    return [number >> bit & 1 for bit in range(_BITS)]


def write_spelling_projector(path: Path, model: Path, token_ids: Sequence[int]) -> Speller:
    """Write the projector of ``model`` for pictures of ``token_ids``, at most 4096 of them."""
    embeddings = embeddings_of(model)[list(token_ids)]
    codes = np.array([_code(number) for number in range(len(token_ids))], np.float32) * 2 - 1
    convolution = np.zeros((_BITS, 3, PATCH, PATCH), np.float32)
    for bit in range(_BITS):
        block = _BLOCK * (bit // 3)
        convolution[bit, bit % 3, :_BLOCK, block : block + _BLOCK] = 1 / _BLOCK**2
    # Pixels come as -1 and 1. All bits right gives _FOUND, another number of them at most -3 * _FOUND, of which GELU
    # leaves nothing.
    recognised = 2 * _FOUND * codes
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "janus_pro")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for key, number in {
        "image_size": SIDE * PATCH,
        "patch_size": PATCH,
        "embedding_length": _BITS,
        "feed_forward_length": len(token_ids),
        "projection_dim": embeddings.shape[1],
        "block_count": 0,
        "attention.head_count": 1,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    writer.add_tensor("v.patch_embd.weight", convolution)
    writer.add_tensor("mm.0.weight", recognised.astype(np.float32))
    writer.add_tensor("mm.0.bias", np.full(len(token_ids), _FOUND * (1 - 2 * _BITS), np.float32))
    writer.add_tensor("mm.1.weight", np.ascontiguousarray(embeddings.T / _FOUND, np.float32))
    writer.add_tensor("mm.1.bias", np.zeros(embeddings.shape[1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Speller(tuple(token_ids))


def embeddings_of(model: Path) -> NDArray[np.float32]:
    """Return the embeddings [tokens, size] of a model."""
    return tensors_of(model)["token_embd.weight"].values()


_BYTES = range(3, 259)
BEFORE, BETWEEN, AFTER = [1, 60, 61, 62], [90, 91], [70, 71, 72]
FIRST, SECOND = [range(40 + CELLS)[-CELLS:], range(140 + CELLS)[-CELLS:]]
WORDS = [*BEFORE, *FIRST, *BETWEEN, *SECOND, *AFTER]


class SpellingModel:
    """A model, its projector, and pictures for it."""

    def __init__(self, folder: Path) -> None:
        self.model = write_tiny_llama(folder / "tiny.gguf")
        self.speller: Speller = write_spelling_projector(folder / "mmproj-tiny.gguf", self.model, _BYTES)

    def picture(self, tokens: Sequence[int]) -> Medium:
        """Return a picture that spells `CELLS` tokens."""
        side = SIDE * PATCH
        shape = MediaShape(media_id=bytes(tokens), kind=MediaKind.IMAGE, width=side, height=side)
        return Medium(shape, self.speller.picture(tokens).tobytes())

    def driver(self, layout: KvLayout, **flags: Any) -> ModelDriver:
        """Return a shard with the model, which its caller closes."""
        return ModelDriver(self.model, **{"ctx_size": 2048, "kv_layout": layout.value, **flags})

    def prompt(self, driver: ModelDriver, *, encodes: bool = True) -> MediaPrompt:
        """Return the prompt `WORDS`, of which pictures spell two parts."""
        first, second = self.picture(FIRST), self.picture(SECOND)
        return media_prompt(driver, BEFORE, first, BETWEEN, second, AFTER, encodes=encodes)


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

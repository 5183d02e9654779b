"""Writes a projector whose pictures spell words: a patch has the very embedding of the token that it stands for.

So a prompt with such a picture has the logits of the prompt with its words, and texts can be compared. It is a
projector of Janus-Pro without layers: a convolution that reads a patch as bits, one unit for each token that recognises
its bits, and the embeddings of these tokens. All numbers are powers of two or copied, so that nothing is rounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.media import MediaKind, MediaShape
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
    tensors = gguf.GGUFReader(model).tensors
    table = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
    return gguf.quants.dequantize(table.data, table.tensor_type)


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

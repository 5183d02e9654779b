"""A small model and projector of each kind: positions in a grid, cells that see each other, varying sizes, sound."""

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp

from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_testing.media_prompts import MediaPrompt, Medium, media_prompt
from caravan_testing.projectors import (
    spelled_sound,
    write_gemma_projector,
    write_grid_projector,
    write_sound_projector,
    write_varying_projector,
)
from caravan_testing.shard_models import ModelDriver
from caravan_testing.shard_tiny_delta import write_tiny_delta
from caravan_testing.shard_tiny_gemma import write_tiny_gemma
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.shard_tiny_mrope import write_tiny_mrope

_BYTES = tuple(range(3, 259))
_SIZE = 64
TEXTS = "What is this? ", " And that? ", " It is"


@dataclass(frozen=True)
class Kind:
    """``shifts``: a medium takes fewer positions than cells."""

    name: str
    write_model: Callable[[Path], Path]
    write_projector: Callable[[Path, Path], Path]
    atomic: bool = False
    shifts: bool = False

    @property
    def sounds(self) -> bool:
        """Whether its media are sounds."""
        return self.name == "sound"


KINDS = [
    Kind("grid", write_tiny_mrope, lambda path, _: write_grid_projector(path, _SIZE), atomic=True, shifts=True),
    Kind("gemma", write_tiny_gemma, lambda path, _: write_gemma_projector(path, _SIZE), atomic=True),
    Kind("varying", write_tiny_llama, lambda path, _: write_varying_projector(path, _SIZE)),
    Kind("sound", write_tiny_llama, lambda path, model: write_sound_projector(path, model, _BYTES)),
]

# Half of its layers are recurrent, so that no sequence is cut back.
HYBRID = Kind("hybrid", write_tiny_delta, lambda path, _: write_grid_projector(path, _SIZE), atomic=True, shifts=True)


class MadeKind:
    """A kind's files, a shard with them, and prompts for it."""

    def __init__(self, kind: Kind, layout: KvLayout, folder: Path, cells: int = 4096, **flags: Any) -> None:
        self.kind = kind
        self.model = kind.write_model(folder / "model.gguf")
        self.projector = kind.write_projector(folder / "mmproj.gguf", self.model)
        self.driver = ModelDriver(self.model, ctx_size=cells, kv_layout=layout.value, **flags)

    def medium(self, seed: int) -> Medium:
        """Return a random picture or sound."""
        random = np.random.default_rng(seed)
        if self.kind.sounds:
            samples = spelled_sound(_BYTES, random.choice(_BYTES, 20).tolist())
            shape = MediaShape(media_id=bytes([seed]), kind=MediaKind.AUDIO, samples=len(samples))
            return Medium(shape, samples.tobytes())
        width, height = random.integers(20, 150, 2).tolist()
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        shape = MediaShape(media_id=bytes([seed]), kind=MediaKind.IMAGE, width=width, height=height)
        return Medium(shape, pixels.tobytes())

    def parts(self, seed: int) -> tuple[str | Medium, ...]:
        """Return a prompt with two media."""
        first, second, third = TEXTS
        return first, self.medium(2 * seed), second, self.medium(2 * seed + 1), third

    def prompt(self, seed: int) -> MediaPrompt:
        """Return the cells of this prompt, with its media encoded."""
        tokenize = self.driver.backend.vocabulary.tokenize
        read = [
            part if isinstance(part, Medium) else tokenize(part, add_special=place == 0, parse_special=True)
            for place, part in enumerate(self.parts(seed))
        ]
        return media_prompt(self.driver, *read)

    def close(self) -> None:
        """Free the shard."""
        self.driver.engine.close()


_MARKER = mtmd_cpp.mtmd_default_marker()


class MtmdReference:
    """A model with its projector and one sequence."""

    def __init__(self, model: Path, projector: Path, *, flash: bool = True, ubatch: int = 512) -> None:
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(model), parameters)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max = 2048, 2048, ubatch, 1
        context.n_threads = context.n_threads_batch = 1
        context.flash_attn_type = int(flash)
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        media = mtmd_cpp.mtmd_context_params_default()
        media.print_timings, media.n_threads = False, 1
        self._media = mtmd_cpp.mtmd_init_from_file(os.fsencode(projector), self._model, media)
        assert self._media

    def output(self, *parts: str | Medium, count: int) -> list[int]:
        """Return the first tokens of the greedy output; no token ends it."""
        logits = np.ctypeslib.as_array(self._evaluate(parts), (self._vocabulary_size,))
        output = []
        for _ in range(count):
            token = int(np.argmax(logits))
            output.append(token)
            tokens = (llama_cpp.llama_token * 1)(token)
            batch = llama_cpp.llama_batch_get_one(tokens, 1)
            position = (llama_cpp.llama_pos * 1)(self._past.value)
            batch.pos = ctypes.cast(position, type(batch.pos))
            assert llama_cpp.llama_decode(self._context, batch) == 0
            self._past.value += 1
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (self._vocabulary_size,))
        return output

    @property
    def _vocabulary_size(self) -> int:
        return int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))

    def _evaluate(self, parts: Sequence[str | Medium]) -> Any:
        """Compute the prompt in an empty context and return its last logits."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        text = b"".join(_MARKER if isinstance(part, Medium) else part.encode() for part in parts)
        bitmaps = [_bitmap(part) for part in parts if isinstance(part, Medium)]
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        given = mtmd_cpp.mtmd_input_text(text, len(text), True, True)
        array = (mtmd_cpp.mtmd_bitmap_p_ctypes * len(bitmaps))(*bitmaps)
        assert mtmd_cpp.mtmd_tokenize(self._media, chunks, ctypes.byref(given), array, len(bitmaps)) == 0
        self._past = llama_cpp.llama_pos()
        code = mtmd_cpp.mtmd_helper_eval_chunks(
            self._media, self._context, chunks, 0, 0, 2048, True, ctypes.byref(self._past)
        )
        assert code == 0, code
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd_cpp.mtmd_bitmap_free(bitmap)
        return llama_cpp.llama_get_logits(self._context)

    def close(self) -> None:
        """Free everything."""
        mtmd_cpp.mtmd_free(self._media)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _bitmap(medium: Medium) -> Any:
    shape, data = medium.shape, medium.data
    if shape.kind is MediaKind.IMAGE:
        pixels = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return mtmd_cpp.mtmd_bitmap_init(shape.width, shape.height, pixels)
    samples = (ctypes.c_float * shape.samples).from_buffer_copy(data)
    return mtmd_cpp.mtmd_bitmap_init_from_audio(shape.samples, samples)

"""What llama.cpp's own programs make of a prompt with media: libmtmd's helper computes it in a context of its own."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp

from caravan_proto.messages.media import MediaKind
from caravan_testing.media_prompts import Medium

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

"""Encodes pictures and sound with llama.cpp's libmtmd.

The library checks little of what it gets, and what it asserts ends the process. So a shape is checked before it.
"""

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_model_n_embd_inp, mtmd_cpp

from caravan_proto.limits import MAX_MEDIA_BYTES
from caravan_proto.messages.media import MediaFacts, MediaKind, MediaShape
from caravan_shard.arrays import Floats, Ids
from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.log import log_callback
from caravan_shard.media.encoder import EncodedSlice, EncodingError, MediumTokens, SliceSize

_TEXT, _IMAGE = 0, 1


class ForeignProjectorError(StartupError):
    """A projector does not fit the model."""


class LlamaMediaEncoder:
    """A MediaEncoder. ``has_planes``: positions have several dimensions (M-RoPE), of which a picture is a grid.

    ``is_causal``: the cells of a picture see those before them only.
    """

    def __init__(self, path: Path, model: Any, parameters: Any, fingerprint: bytes) -> None:
        """Load the projector; raises StartupError.

        ``model``: the llama_model that it was made for. ``parameters``: of `mtmd_init_from_file`.
        """
        mtmd_cpp.mtmd_log_set(log_callback, None)
        # `close` waits for both: calls come from other threads than that of the backend.
        self._tokenizing, self._encoding = threading.Lock(), threading.Lock()
        self._width = int(llama_model_n_embd_inp(model))
        self._context: Any = mtmd_cpp.mtmd_init_from_file(os.fsencode(path), model, parameters)
        if not self._context:
            raise ForeignProjectorError(
                f"llama.cpp cannot load {path} as the projector of this model: it is damaged, or made for another "
                "model; pass --mmproj with the right file, or --no-mmproj; see --log-level debug"
            )
        self.has_planes = bool(mtmd_cpp.mtmd_decode_use_mrope(self._context))
        images = bool(mtmd_cpp.mtmd_support_vision(self._context))
        audio = bool(mtmd_cpp.mtmd_support_audio(self._context))
        rate = int(mtmd_cpp.mtmd_get_audio_sample_rate(self._context)) if audio else 0
        # Sound is causal in all models.
        self.is_causal = not bool(mtmd_cpp.mtmd_decode_use_non_causal(self._context, None))
        self.facts = MediaFacts(
            images=images,
            audio=audio,
            atomic=self.has_planes or not self.is_causal,
            max_cells=1,  # see `find_largest`
            fingerprint=fingerprint,
            audio_sample_rate=rate,
            max_bytes=MAX_MEDIA_BYTES,
        )

    def find_largest(self, shapes: Sequence[MediaShape], most: int | None = None) -> None:
        """Find the most cells of a slice, among media of these shapes; ``most`` at most. Raises StartupError and
        EncodingError.
        """
        cells = [self.facts.max_cells]
        for shape in shapes:
            for found in self.tokenize(shape):
                if isinstance(found, SliceSize):
                    cells.append(found.cells)
                elif min(found) < 0:
                    raise ForeignProjectorError(
                        "the model lacks tokens that the projector wants around images or audio: it was made for "
                        "another model; pass --mmproj with the right file, or --no-mmproj"
                    )
        self.facts = replace(self.facts, max_cells=max(cells) if most is None else min(most, max(cells)))

    def tokenize(self, shape: MediaShape) -> MediumTokens:
        """See `MediaEncoder`."""
        with self._tokenizing, self._chunks(shape, None) as chunks:
            return [self._described(chunk) for chunk in chunks]

    def encode(self, shape: MediaShape, data: bytes) -> Sequence[EncodedSlice]:
        """See `MediaEncoder`."""
        with self._encoding, self._chunks(shape, data) as chunks:
            return [self._encoded(chunk) for chunk in chunks if _kind_of(chunk) != _TEXT]

    @contextmanager
    def _chunks(self, shape: MediaShape, data: bytes | None) -> Iterator[Sequence[Any]]:
        """Yield the library's chunks of a medium: text and slices. Without ``data``, only their sizes are known."""
        if self._context is None:
            raise EncodingError("the shard is ending")
        part = mtmd_cpp.mtmd_input_part()
        part.bitmap = self._bitmap(shape, data)
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        try:
            parts = (ctypes.POINTER(mtmd_cpp.mtmd_input_part) * 1)(ctypes.pointer(part))
            code = mtmd_cpp.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False)
            if code != 0:
                raise EncodingError(f"llama.cpp cannot read {_in_words(shape)} (code {code})")
            count = int(mtmd_cpp.mtmd_input_chunks_size(chunks))
            yield [mtmd_cpp.mtmd_input_chunks_get(chunks, place) for place in range(count)]
        finally:
            mtmd_cpp.mtmd_input_chunks_free(chunks)
            mtmd_cpp.mtmd_bitmap_free(part.bitmap)

    def _bitmap(self, shape: MediaShape, data: bytes | None) -> Any:
        # The library copies the bytes.
        if shape.kind is MediaKind.IMAGE:
            pixels = None if data is None else (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
            return mtmd_cpp.mtmd_bitmap_init(shape.width, shape.height, pixels)
        samples = None if data is None else (ctypes.c_float * shape.samples).from_buffer_copy(data)
        return mtmd_cpp.mtmd_bitmap_init_from_audio(shape.samples, samples)

    def _described(self, chunk: Any) -> Sequence[int] | SliceSize:
        if _kind_of(chunk) != _TEXT:
            return _size_of(chunk)
        count = ctypes.c_size_t()
        tokens = mtmd_cpp.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return [int(tokens[place]) for place in range(count.value)]

    def _encoded(self, chunk: Any) -> EncodedSlice:
        size = _size_of(chunk)
        if mtmd_cpp.mtmd_encode_chunk(self._context, chunk) != 0:
            raise EncodingError("llama.cpp failed to encode it")
        output = mtmd_cpp.mtmd_get_output_embd(self._context)
        embeddings: Floats = np.ctypeslib.as_array(output, (size.cells, self._width)).copy()
        if not np.isfinite(embeddings).all():
            raise EncodingError("its embeddings are not finite")
        return EncodedSlice(
            embeddings=embeddings,
            size=size,
            planes=self._planes(chunk, size) if self.has_planes else None,
            causal=not bool(mtmd_cpp.mtmd_decode_use_non_causal(self._context, chunk)),
        )

    @staticmethod
    def _planes(chunk: Any, size: SliceSize) -> Ids | None:
        """Return the relative positions of a slice that is a grid; None if its cells follow each other."""
        if _kind_of(chunk) != _IMAGE:
            return None
        tokens = mtmd_cpp.mtmd_input_chunk_get_tokens_image(chunk)
        at = [mtmd_cpp.mtmd_image_tokens_get_decoder_pos(tokens, 0, place) for place in range(size.cells)]
        if at[-1].z > 0:
            return None
        return np.array([(one.t, one.y, one.x) for one in at], np.int32).T.copy()

    def close(self) -> None:
        """Free the projector, once nothing is being encoded."""
        with self._tokenizing, self._encoding:
            mtmd_cpp.mtmd_free(self._context)
            self._context = None


def _kind_of(chunk: Any) -> int:
    return int(mtmd_cpp.mtmd_input_chunk_get_type(chunk))


def _size_of(chunk: Any) -> SliceSize:
    return SliceSize(
        int(mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)), int(mtmd_cpp.mtmd_input_chunk_get_n_pos(chunk))
    )


def _in_words(shape: MediaShape) -> str:
    if shape.kind is MediaKind.IMAGE:
        return f"an image of {shape.width} x {shape.height} pixels"
    return f"audio of {shape.samples} samples"

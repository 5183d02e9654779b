"""Loads the projector of a model if it can be served, and encodes images and audio with llama.cpp's libmtmd.

The library checks little of what it gets, and what it asserts ends the process. So a shape is checked before it.
"""

import ctypes
import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from llama_cpp import llama_model_n_embd_inp, mtmd_cpp

from caravan_models.contents import fingerprint
from caravan_models.errors import FetchError
from caravan_models.gguf_header import read_header
from caravan_proto.limits import MAX_MEDIA_BYTES, MEDIA_SIDES
from caravan_proto.messages.media import MediaFacts, MediaKind, MediaShape
from caravan_shard.arrays import Floats, Ids
from caravan_shard.backends.llama.memory.context import Contexts
from caravan_shard.backends.llama.model.log import log_callback
from caravan_shard.config import ShardConfig
from caravan_shard.media import EncodedSlice, EncodingError, MediumTokens, SliceSize
from caravan_shard.startup_error import StartupError

_TEXT, _IMAGE = 0, 1

_log = logging.getLogger(__name__)

# Their pictures have other tokens at another place of a prompt, so that no prefix could be shared.
_PLACED = frozenset({"deepseek4v", "hunyuanvl"})
_PROJECTOR_KEYS = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")
# The longest side of a picture that routers send is 2048.
_ORDINARY = ((2048, 2048), (2048, 1024), (1024, 2048))
_EXTREME = ((2048, MEDIA_SIDES[0]), (MEDIA_SIDES[0], 2048), (MEDIA_SIDES[0], MEDIA_SIDES[0]))
_SECONDS = 30
# Of a slice that may be cut.
_MOST_CELLS = 1 << 16


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
        with self._tokenizing, self._chunks(shape, None) as chunks:
            return [self._described(chunk) for chunk in chunks]

    def encode(self, shape: MediaShape, data: bytes) -> Sequence[EncodedSlice]:
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


def open_encoder(config: ShardConfig, path: Path, model: Any, contexts: Contexts) -> LlamaMediaEncoder:
    """Load the projector of ``model``, a llama_model. Raises StartupError.

    Pictures that are computed in one piece must fit into a step of ``contexts``. Where their size decides how many
    tokens they have and the flags set no bound, this is the bound.
    """
    started = monotonic()
    _check_file(path)
    encoder = _open(config, path, model)
    most = _most_cells(encoder, contexts)
    if encoder.facts.max_cells > most and config.image_max_tokens is None:
        encoder.close()
        encoder = _open(replace(config, image_max_tokens=most), path, model)
        _log.info("large images are scaled down to fit into a step", extra={"image_max_tokens": most})
    facts = encoder.facts
    if facts.max_cells > most:
        encoder.close()
        raise StartupError(
            f"an image may take {facts.max_cells} tokens, which this model computes in one piece, and a step has room "
            f"for {most}: pass -b and -ub {facts.max_cells} or more, --image-max-tokens {most}, or --no-mmproj"
        )
    # Pictures of extreme shapes may have more cells: they are refused one by one.
    encoder.find_largest(_shapes(encoder, _EXTREME), most)
    facts = encoder.facts
    _log.info(
        "projector ready",
        extra={
            "path": path.name,
            "images": facts.images,
            "audio": facts.audio,
            "max_cells": facts.max_cells,
            "seconds": round(monotonic() - started, 1),
        },
    )
    return encoder


def _open(config: ShardConfig, path: Path, model: Any) -> LlamaMediaEncoder:
    encoder = LlamaMediaEncoder(path, model, _parameters(config), _fingerprint(config, path))
    try:
        encoder.find_largest(_shapes(encoder, _ORDINARY))
    except EncodingError as error:
        encoder.close()
        raise StartupError(f"the projector {path} cannot be used: {error}") from error
    except StartupError:
        encoder.close()
        raise
    return encoder


def _most_cells(encoder: LlamaMediaEncoder, contexts: Contexts) -> int:
    """Return how many cells a slice may have: as many as a step, or an ubatch where its cells see each other."""
    if not encoder.facts.atomic:
        return _MOST_CELLS
    if encoder.is_causal:
        return contexts.batch_tokens
    return min(int(contexts.parameters(layout).n_ubatch) for layout in contexts.layouts)


def _check_file(path: Path) -> None:
    try:
        header = read_header(path)
    except (OSError, FetchError) as error:
        raise StartupError(f"cannot read the projector: {error}; pass --mmproj another, or --no-mmproj") from error
    placed = [kind for key in _PROJECTOR_KEYS if (kind := header.text(key)) in _PLACED]
    if placed:
        raise StartupError(
            f"{path} is a projector of the kind {placed[0]}, in which an image's tokens depend on its place in the "
            "prompt: not served; pass --no-mmproj for text only"
        )


def _parameters(config: ShardConfig) -> Any:
    """Return the ``mtmd_context_params``."""
    parameters = mtmd_cpp.mtmd_context_params_default()
    parameters.use_gpu = config.uses_gpus
    parameters.print_timings = False
    parameters.n_threads = config.media_threads or config.decode_threads
    parameters.image_min_tokens = -1 if config.image_min_tokens is None else config.image_min_tokens
    parameters.image_max_tokens = -1 if config.image_max_tokens is None else config.image_max_tokens
    return parameters


def _fingerprint(config: ShardConfig, path: Path) -> bytes:
    said = (fingerprint([path]), config.image_min_tokens, config.image_max_tokens)
    return hashlib.sha256(repr(said).encode()).digest()


def _shapes(encoder: LlamaMediaEncoder, sides: Sequence[tuple[int, int]]) -> list[MediaShape]:
    """Return pictures with these sides and a long sound, as far as the model takes them."""
    shapes = []
    if encoder.facts.images:
        shapes += [MediaShape(media_id=b"-", kind=MediaKind.IMAGE, width=x, height=y) for x, y in sides]
    if encoder.facts.audio:
        samples = _SECONDS * encoder.facts.audio_sample_rate
        shapes.append(MediaShape(media_id=b"-", kind=MediaKind.AUDIO, samples=samples))
    return shapes

"""Loads the projector of a model if it can be served."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from llama_cpp import mtmd_cpp

from caravan_models.errors import FetchError
from caravan_models.fingerprint import fingerprint
from caravan_models.gguf_header import read_header
from caravan_proto.limits import MEDIA_SIDES
from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.context import Contexts
from caravan_shard.backends.llama.media_encoder import LlamaMediaEncoder
from caravan_shard.config import ShardConfig
from caravan_shard.media.encoder import EncodingError

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

"""Finds the projector of a model, and loads it where llama.cpp was built with libmtmd."""

import logging
from pathlib import Path
from typing import Any

from caravan_models.cached_model import local_projector
from caravan_shard.backends.llama.memory.context import Contexts
from caravan_shard.config import ShardConfig
from caravan_shard.media import MediaEncoder
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)


def find_projector(config: ShardConfig) -> Path | None:
    """Return the projector's file: the one that the flags name, or one beside the model; None without one."""
    if config.mmproj:
        return Path(config.mmproj)
    return local_projector(Path(config.model)) if config.mmproj_auto else None


def load_projector(config: ShardConfig, model: Any, contexts: Contexts) -> MediaEncoder | None:
    """Load the projector of a llama_model; None without one. Raises StartupError."""
    path = find_projector(config)
    if path is None:
        return None
    try:
        # Imported here, since a build of llama.cpp without libmtmd serves text.
        from caravan_shard.backends.llama.media.projector import ForeignProjectorError, open_encoder
    except (ImportError, OSError, RuntimeError) as error:
        raise StartupError(
            f"this build of llama.cpp cannot use the projector {path}: it has no libmtmd, which -DLLAVA_BUILD=OFF "
            "leaves out; pass --no-mmproj for text only"
        ) from error
    try:
        return open_encoder(config, path, model, contexts)
    except ForeignProjectorError as error:
        if config.mmproj:
            raise
        _log.warning("prompts have text only, without the projector that lies beside the model: %s", error)
        return None

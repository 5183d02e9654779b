"""Makes the backend that the configuration names."""

import logging
from collections.abc import Callable

from caravan_shard.backends.base import Backend
from caravan_shard.backends.fake import FakeBackend
from caravan_shard.config import ShardConfig

_log = logging.getLogger(__name__)


def backend_loader(config: ShardConfig) -> Callable[[], Backend]:
    """A function that loads and warms up the backend; it raises StartupError. Call it on the worker's thread."""
    return (lambda: _load_fake(config)) if config.backend == "fake" else (lambda: _load_llama(config))


def _load_fake(config: ShardConfig) -> Backend:
    _log.info("toy model ready")
    return FakeBackend(
        cells=config.ctx_size or 8192,
        max_sequences=config.parallel,
        max_batch_tokens=config.batch_size,
        layout=config.layout,
        step_s=config.fake_step_ms / 1000,
        token_s=config.fake_token_ms / 1000,
    )


def _load_llama(config: ShardConfig) -> Backend:
    # Here, so that the toy model needs no llama.cpp.
    from caravan_shard.backends.llama_cpp_backend import LlamaCppBackend

    return LlamaCppBackend(config)

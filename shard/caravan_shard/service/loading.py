"""Makes the backend and the swap space that the flags describe."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from caravan_shard.backends.base import Backend, StartupError
from caravan_shard.backends.toy.backend import EMBEDDING_SIZE, ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.sequences.state_stores import DiskStore, MemoryStore, StateStore
from caravan_shard.sequences.swap import SwapSpace

_log = logging.getLogger(__name__)


def backend_loader(config: ShardConfig) -> Callable[[], Backend]:
    """Return a function that loads and warms up the backend or raises StartupError. Call it on the worker's thread."""
    return (lambda: _load_fake(config)) if config.backend == "fake" else (lambda: _load_llama(config))


def _load_fake(config: ShardConfig) -> Backend:
    _log.info("toy model ready")
    return ToyBackend(
        cells=config.ctx_size or 8192,
        max_sequences=config.parallel,
        max_batch_tokens=config.batch_size,
        layout=config.layout,
        adapters=[adapter.name for adapter in config.adapters],
        embedding_size=EMBEDDING_SIZE if config.embeddings else 0,
        step_s=config.fake_step_ms / 1000,
        token_s=config.fake_token_ms / 1000,
    )


def _load_llama(config: ShardConfig) -> Backend:
    # OpenMP reads the variable when llama.cpp is loaded. With its default (300,000), a step's threads wait for each
    # other's time slices when other processes want the cores: on two cores with two busy processes beside it, a step
    # of 44 ms took more than a second. Sleeping at once (OMP_WAIT_POLICY=passive) slows a quiet host by 40 %, this
    # value by 5 %.
    os.environ.setdefault("GOMP_SPINCOUNT", str(config.spin_count))
    # Imported here, so that the toy model needs no llama.cpp.
    from caravan_shard.backends.llama.backend import LlamaCppBackend

    return LlamaCppBackend(config)


def make_swap_space(config: ShardConfig) -> SwapSpace:
    """Return a swap space with the stores that the flags ask for, memory before disk; raises StartupError."""
    stores: list[StateStore] = []
    if config.swap_memory_bytes > 0:
        stores.append(MemoryStore(config.swap_memory_bytes))
    if config.swap_disk_bytes > 0:
        try:
            stores.append(DiskStore(Path(config.swap_dir), config.swap_disk_bytes))
        except OSError as error:
            raise StartupError(f"cannot make files in --swap-dir {config.swap_dir}: {error.strerror}") from error
    return SwapSpace(stores)

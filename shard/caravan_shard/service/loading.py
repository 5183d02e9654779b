"""Makes the backend and the store of saved runs that the flags describe."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from caravan_shard.backends.base import Backend, RunSaving, StartupError
from caravan_shard.backends.toy.backend import EMBEDDING_SIZE, ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.host_memory import available_memory
from caravan_shard.sequences.run_files import RunFiles
from caravan_shard.sequences.runs import RunStore

_log = logging.getLogger(__name__)

# This share of the free memory is left to others.
_FREE_SHARE = 8


def backend_loader(config: ShardConfig) -> Callable[[], Backend]:
    """Return a function that loads and warms up the backend or raises StartupError. Call it on the worker's thread."""
    return (lambda: _load_fake(config)) if config.backend == "fake" else (lambda: _load_llama(config))


def _load_fake(config: ShardConfig) -> Backend:
    _log.info("toy model ready")
    cells = config.ctx_size or 8192
    layout, *other_layouts = config.layouts(cells)
    backend = ToyBackend(
        cells=cells,
        max_sequences=config.parallel,
        max_batch_tokens=config.batch_size,
        layout=layout,
        other_layouts=other_layouts,
        adapters=[adapter.name for adapter in config.adapters],
        embedding_size=EMBEDDING_SIZE if config.embeddings else 0,
        step_s=config.fake_step_ms / 1000,
        token_s=config.fake_token_ms / 1000,
        draft_model=ToyBackend(cells=cells, max_sequences=config.parallel) if config.model_draft else None,
    )
    backend.facts = replace(backend.facts, draft_model=Path(config.model_draft).name)
    if config.model:
        backend.facts = replace(backend.facts, name=Path(config.model).name, fingerprint=f"toy-{config.model}")
    return backend


def _load_llama(config: ShardConfig) -> Backend:
    # OpenMP reads the variable when llama.cpp is loaded. With its default (300,000), a step's threads wait for each
    # other's time slices when other processes want the cores: on two cores with two busy processes beside it, a step
    # of 44 ms took more than a second. Sleeping at once (OMP_WAIT_POLICY=passive) slows a quiet host by 40 %. With
    # 20,000, a lone stream is as fast as in llama-server; 300 cost it 5 % and more.
    os.environ.setdefault("GOMP_SPINCOUNT", str(config.spin_count))
    # Imported here, so that the toy model needs no llama.cpp.
    from caravan_shard.backends.llama.backend import LlamaCppBackend

    return LlamaCppBackend(config)


def make_run_store(config: ShardConfig, backend: Backend) -> RunStore:
    """Return a store of saved runs with the space that the flags ask for; raises StartupError.

    Call it once the model is loaded, so that the memory it takes is gone from what is free.
    """
    memory_bytes = config.cache_ram << 20
    available = available_memory()
    if available is not None and memory_bytes > available - available // _FREE_SHARE:
        memory_bytes = available - available // _FREE_SHARE
        _log.info("--cache-ram is more than the host has free", extra={"mib_used": memory_bytes >> 20})
    if config.cache_dir_bytes == 0 or backend.capacity.current.saving is RunSaving.NOTHING:
        return RunStore(memory_bytes)
    try:
        files = RunFiles(Path(config.cache_dir), backend.state_fingerprint)
        return RunStore(memory_bytes, files, config.cache_dir_bytes)
    except OSError as error:
        raise StartupError(f"cannot use --cache-dir {config.cache_dir}: {error.strerror or error}") from error

"""Makes the backend and the store of saved runs that the flags describe."""

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from caravan_proto.host_memory import available_memory
from caravan_proto.messages.limits import Saving
from caravan_proto.messages.model import ModelFile
from caravan_shard.backends.base import Backend, Vocabulary
from caravan_shard.backends.given_embeddings import EmbeddingsEncoder
from caravan_shard.config import ShardConfig
from caravan_shard.sequences.run_files import RunFiles, check_folder
from caravan_shard.sequences.runs import RunStore
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)

# This share of the free memory is left to others.
_FREE_SHARE = 8


# Begins to read a vocabulary on another thread, which is among the users of the model.
ReadVocabulary = Callable[[Vocabulary, ModelFile], object]


@contextlib.contextmanager
def gpu_turn(folder: Path | None = None) -> Iterator[None]:
    """Wait until no other shard of this user is loading, and let none load meanwhile: each sees what others left free.

    It ends with the process, however that ends. ``folder``: where the lock is, by default that of temporary files. A
    host without room for it has no turns.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"caravan-gpus-{os.getuid()}.lock"
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("shards that start together may see the same memory as free: %s", error)
        yield
        return
    try:
        _lock(lock)
        yield
    finally:
        os.close(lock)


def _lock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("waiting for another shard to load")
        fcntl.flock(lock, fcntl.LOCK_EX)


def backend_loader(config: ShardConfig, read_vocabulary: ReadVocabulary | None = None) -> Callable[[], Backend]:
    """Return a function that loads and warms up the backend or raises StartupError. Call it on the worker's thread.

    ``read_vocabulary``: called, if loading takes long, with the vocabulary of a model that generates. What it begins
    goes on while the context is made.
    """
    return (lambda: _load_toy(config)) if config.backend == "fake" else (lambda: _load_llama(config, read_vocabulary))


def _load_toy(config: ShardConfig) -> Backend:
    # Imported here, so that a model need not wait for the toy.
    from caravan_shard.backends.toy.backend import EMBEDDING_SIZE, TOY_INPUT_SIZE, ToyBackend
    from caravan_shard.backends.toy.media import ToyEncoder

    _log.info("toy model ready")
    cells = config.cells_of(trained_context=8192)
    layout, *other_layouts = config.layouts(cells)
    # A projector of any name lets the toy model see; with "atomic" in it, images are computed whole.
    projector = ToyEncoder(atomic="atomic" in config.mmproj) if config.mmproj else None
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
        media=EmbeddingsEncoder(TOY_INPUT_SIZE, projector) if config.enable_prompt_embeds else projector,
    )
    backend.facts = replace(backend.facts, draft_model=Path(config.model_draft).name)
    if config.model:
        backend.facts = replace(backend.facts, name=Path(config.model).name, fingerprint=f"toy-{config.model}")
        backend.contents.sha256 = backend.facts.fingerprint
    backend.facts = replace(config.named(backend.facts), request_defaults=config.request_defaults(lambda _key: None))
    return backend


def _load_llama(config: ShardConfig, read_vocabulary: ReadVocabulary | None) -> Backend:
    # OpenMP, and `kernels/src/barrier.c`, read the variable when llama.cpp is loaded. With OpenMP's default (300,000),
    # a step's threads wait for each other's time slices when other processes want the cores: on two cores with two busy
    # processes beside it, a step of 44 ms took more than a second. Sleeping at once slows a quiet host by 40 %.
    os.environ.setdefault("GOMP_SPINCOUNT", str(config.spin_count))
    # Imported here, so that the toy model needs no llama.cpp.
    from caravan_shard.backends.llama.backend import LlamaCppBackend
    from caravan_shard.backends.llama.devices.devices import find_devices, first_devices
    from caravan_shard.backends.llama.devices.plan import checked, plan_load
    from caravan_shard.backends.llama.embeddings.backend import LlamaEmbeddingBackend
    from caravan_shard.backends.llama.kernels.kernels_abi import warn_of_missing_kernels
    from caravan_shard.backends.llama.model.loading import open_model
    from caravan_shard.backends.llama.model.log import route_llama_log

    route_llama_log()
    devices = first_devices(config.rpc_servers)
    # Before anything else is logged.
    warn_of_missing_kernels()
    with gpu_turn() if devices else contextlib.nullcontext():
        plan = checked(plan_load(config, find_devices() if devices else []))
        if plan.context_line:
            _log.info(plan.context_line)
        config = plan.config
        loaded = open_model(config, plan.devices)
        loaded = replace(loaded, facts=config.named(loaded.facts))
        if loaded.only_embeds:
            return LlamaEmbeddingBackend(config, loaded)
        if read_vocabulary is not None:
            read_vocabulary(loaded.vocabulary, loaded.facts)
        return LlamaCppBackend(config, loaded)


def room_for_runs(config: ShardConfig, available: int | None) -> int:
    """Return the most bytes of saved runs in memory, of which ``available`` bytes are free; None if that is unknown."""
    wanted = config.cache_ram << 20
    return wanted if available is None else min(wanted, available - available // _FREE_SHARE)


def make_run_store(config: ShardConfig, backend: Backend) -> RunStore:
    """Return a store of saved runs with the space that the flags ask for; raises StartupError.

    Call it once the model is loaded, so that the memory it takes is gone from what is free.
    """
    available = available_memory()
    if available is not None and config.backend == "llama" and config.mmap and backend.facts.device_bytes == 0:
        # The file's pages are in memory, but count as free, since the kernel could drop them.
        available = max(0, available - backend.facts.weight_bytes)
    memory_bytes = room_for_runs(config, available)
    if memory_bytes < config.cache_ram << 20:
        _log.info("--cache-ram is more than the host has free", extra={"mib_used": memory_bytes >> 20})
    if config.cache_dir_bytes == 0 or backend.capacity.current.saving is Saving.NOTHING:
        return RunStore(memory_bytes)
    folder = Path(config.cache_dir)
    try:
        check_folder(folder)
        if not backend.contents.state_fingerprint:
            return RunStore(memory_bytes, disk_bytes=config.cache_dir_bytes)
        return RunStore(memory_bytes, RunFiles(folder, backend.contents.state_fingerprint), config.cache_dir_bytes)
    except OSError as error:
        raise StartupError(f"cannot use --cache-dir {config.cache_dir}: {error.strerror or error}") from error

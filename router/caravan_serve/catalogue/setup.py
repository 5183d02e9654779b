"""Makes the catalogue of `caravan serve` of its flags."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from caravan_models.cache_layout import cache_folder
from caravan_proto.flags import flag
from caravan_proto.host_memory import available_memory
from caravan_router.app import CatalogueOf
from caravan_router.engine.fleet import Fleet
from caravan_serve.catalogue.entries import CatalogueEntry, read_catalogue
from caravan_serve.catalogue.host import HostSettings, ShardHost
from caravan_serve.catalogue.memory import MARGIN_BYTES, Memory
from caravan_serve.catalogue.model_catalogue import CatalogueSettings, ModelCatalogue
from caravan_serve.catalogue.stock import MadeFile, stored_entries
from caravan_serve.shard_flags import ShardValues

# A part of the free disk in this many is for what each model has cached, and so many MiB of memory while it is loaded.
_DISK_SHARE = 10
_CACHE_RAM_MIB = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueFlags:
    """Where the models are described, and what may be loaded at a time."""

    models_dir: str | None = flag(
        None, "folder of GGUF files; each is a model that is loaded on demand and unloaded to make room for others"
    )
    models_file: str | None = flag(None, "TOML file of models to load on demand, with their names, aliases and flags")
    models_hub: bool = flag(
        False,
        "serve every model in the hub cache (see `caravan list`) on demand, and let operators download, delete, copy "
        "and derive models with /api/pull, /api/delete, /api/copy and /api/create",
    )
    models_max: int | None = flag(None, "maximum number of models loaded at a time [as many as fit]", low=1)
    models_memory: int | None = flag(
        None, "memory limit for all loaded models together, in MiB of this host's memory [what is free]", low=1
    )
    models_turn_s: float = flag(
        30.0,
        "seconds that a loaded model with requests stays loaded while requests for another model wait",
        low=0,
    )
    models_autoload: bool = flag(
        True, "load models when requests ask for them; when off, only operators load them, with /models/load"
    )

    @property
    def has_catalogue(self) -> bool:
        """Whether models are loaded as requests ask for them."""
        return self.models_dir is not None or self.models_file is not None or self.models_hub


async def make_catalogue(flags: CatalogueFlags, given: ShardValues, shards: int, folder: Path) -> CatalogueOf:
    """Read which models there are, and return what makes their catalogue.

    ``shards``: processes of each model. ``folder``: for sockets and cached cells. Raises CatalogueFileError.
    """
    file = None if flags.models_file is None else Path(flags.models_file)
    models = None if flags.models_dir is None else Path(flags.models_dir)
    entries = await asyncio.to_thread(read_catalogue, file, models)
    made_file, made = None, {}
    if flags.models_hub:
        made_file = MadeFile(cache_folder())
        made = await asyncio.to_thread(made_file.read)
        entries = with_stored(entries, await asyncio.to_thread(stored_entries))
    budget_bytes = None if flags.models_memory is None else flags.models_memory << 20
    available = available_memory()
    host = HostSettings(
        folder=folder,
        flags={**kept_cells(given, folder), **given},
        shards=shards,
        memory_bytes=budget_bytes or (None if available is None else max(0, available - MARGIN_BYTES)),
        side_by_side=1 if flags.models_max == 1 else 2,
    )

    def catalogue_of(fleet: Fleet) -> ModelCatalogue:
        memory = Memory(host, budget_bytes, flags.models_max)
        settings = CatalogueSettings(
            turn_s=flags.models_turn_s, autoload=flags.models_autoload, made_file=made_file, made=made
        )
        return ModelCatalogue(entries, fleet, ShardHost(host, fleet.started_here), memory, settings)

    return catalogue_of


def with_stored(entries: Sequence[CatalogueEntry], stored: Sequence[CatalogueEntry]) -> tuple[CatalogueEntry, ...]:
    """Return ``entries``, then those of the hub's cache under names that are free."""
    taken = {name for entry in entries for name in (entry.name, *entry.aliases)}
    added = (
        replace(entry, aliases=tuple(alias for alias in entry.aliases if alias not in taken))
        for entry in stored
        if entry.name not in taken
    )
    return (*entries, *added)


def kept_cells(given: ShardValues, folder: Path) -> dict[str, Any]:
    """Return what keeps the cells that models have cached while they are not loaded.

    They lie in ``folder``, which goes when the server ends, unless ``given`` has another one.
    """
    if given.get("cache_dir"):
        return {"cache_ram": _CACHE_RAM_MIB}
    space = shutil.disk_usage(folder).free / _DISK_SHARE / (1 << 30)
    return {"cache_dir": str(folder / "cells"), "cache_dir_space": round(space, 2), "cache_ram": _CACHE_RAM_MIB}

"""Makes the library of `caravan serve` of its flags."""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from caravan_models.cache_folder import cache_folder
from caravan_router.app import LibraryOf
from caravan_router.engine.fleet import Fleet
from caravan_serve.library.catalogue import read_catalogue
from caravan_serve.library.entry import CatalogueEntry
from caravan_serve.library.flags import LibraryFlags
from caravan_serve.library.host import HostSettings, ShardHost
from caravan_serve.library.hub import stored_entries
from caravan_serve.library.library import LibrarySettings, ModelLibrary
from caravan_serve.library.made_file import MadeFile
from caravan_serve.library.memory import Memory, MemorySettings

# A part of the free disk in this many is for what each model has cached, and so many MiB of memory while it is loaded.
_DISK_SHARE = 10
_CACHE_RAM_MIB = 512


async def make_library(flags: LibraryFlags, shard_flags: Sequence[str], shards: int, folder: Path) -> LibraryOf:
    """Read which models there are, and return what makes their library.

    ``shards``: processes of each model. ``folder``: for sockets and cached cells. Raises CatalogueError.
    """
    file = None if flags.models_file is None else Path(flags.models_file)
    models = None if flags.models_dir is None else Path(flags.models_dir)
    entries = await asyncio.to_thread(read_catalogue, file, models)
    made_file, made = None, {}
    if flags.models_hub:
        made_file = MadeFile(cache_folder())
        made = await asyncio.to_thread(made_file.read)
        entries = with_stored(entries, await asyncio.to_thread(stored_entries))
    of_shards = (*kept_cells(shard_flags, folder, os.environ), *shard_flags)

    def library_of(fleet: Fleet) -> ModelLibrary:
        host = ShardHost(HostSettings(folder=folder, flags=of_shards, shards=shards), fleet.started_here)
        memory = Memory(
            MemorySettings(
                flags=of_shards,
                shards=shards,
                budget_bytes=None if flags.models_memory is None else flags.models_memory << 20,
                max_models=flags.models_max,
            )
        )
        settings = LibrarySettings(
            turn_s=flags.models_turn_s, autoload=flags.models_autoload, made_file=made_file, made=made
        )
        return ModelLibrary(entries, fleet, host, memory, settings)

    return library_of


def with_stored(entries: Sequence[CatalogueEntry], stored: Sequence[CatalogueEntry]) -> tuple[CatalogueEntry, ...]:
    """Return ``entries``, then those of the hub's cache under names that are free."""
    taken = {name for entry in entries for name in (entry.name, *entry.aliases)}
    added = (
        replace(entry, aliases=tuple(alias for alias in entry.aliases if alias not in taken))
        for entry in stored
        if entry.name not in taken
    )
    return (*entries, *added)


def kept_cells(flags: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Return the flags that keep what models have cached while they are not loaded, but for what the user has set.

    It lies in ``folder``, which goes when the server ends.
    """
    given = {flag.partition("=")[0] for flag in flags}
    found: list[str] = []
    if "--cache-dir" not in given and not environment.get("CARAVAN_CACHE_DIR"):
        space = shutil.disk_usage(folder).free / _DISK_SHARE / (1 << 30)
        found += ["--cache-dir", str(folder / "cells"), "--cache-dir-space", f"{space:.2f}"]
    if not {"-cram", "--cache-ram"} & given and not environment.get("CARAVAN_CACHE_RAM"):
        found += ["--cache-ram", str(_CACHE_RAM_MIB)]
    return found

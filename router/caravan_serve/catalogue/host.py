"""Starts and ends the shards of models, as child processes on this host."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caravan_proto.flags import as_flags
from caravan_router.engine.discovery import AddressBook
from caravan_serve.catalogue.entries import CatalogueEntry
from caravan_serve.shard_flags import ShardValues, combined, is_toy, memory_share
from caravan_serve.shard_process import ShardProcess, ShardStartError

_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """``folder``: for sockets. ``flags``: of all shards. ``shards``: processes of each model.

    ``memory_bytes``: of the host, from which models choose their cells, whatever is loaded; None if it is unknown.
    ``side_by_side``: how many models should fit into it at a time.
    """

    folder: Path
    flags: ShardValues
    shards: int = 1
    memory_bytes: int | None = None
    side_by_side: int = 2

    def flags_of(self, entry: CatalogueEntry, file: Path) -> list[str]:
        """Return the flags of a shard for a model, whose first file is ``file``."""
        share = {}
        if self.memory_bytes is not None and not is_toy(self.flags):
            share = memory_share([file], file, self.shards * self.side_by_side, self.memory_bytes)
        return as_flags(combined(share, self.flags, entry.flags, {"model": str(file), "alias": entry.name}))


class RunningModel:
    """The shards of a loaded model. ``stop`` ends them."""

    def __init__(self, processes: Sequence[ShardProcess], addresses: AddressBook) -> None:
        """Use `ShardHost.start`."""
        self._processes = processes
        self._addresses = addresses
        self._runs = [asyncio.create_task(process.run()) for process in processes]

    async def until_listening(self) -> None:
        """Wait until all shards have loaded the model, and let the router find them. Raises ShardStartError."""
        while not all(process.listens for process in self._processes):
            for run in self._runs:
                if run.done():
                    run.result()
                    raise ShardStartError("a shard ended while it loaded its model")
            await asyncio.sleep(_POLL_S)
        for process in self._processes:
            self._addresses.add(process.address)

    async def stop(self) -> None:
        """Let what runs on the shards end, and end them. What still runs after their drain timeout waits again."""
        await asyncio.gather(*(process.stop() for process in self._processes))
        for process, run in zip(self._processes, self._runs, strict=True):
            self._addresses.remove(process.address)
            run.cancel()
            with contextlib.suppress(asyncio.CancelledError, ShardStartError):
                await run


class ShardHost:
    """Starts shards. Each start has sockets of its own, so that no link waits for one that is gone."""

    def __init__(self, settings: HostSettings, addresses: AddressBook) -> None:
        self._settings = settings
        self._addresses = addresses
        self._starts = itertools.count()

    def start(self, entry: CatalogueEntry, file: Path) -> RunningModel:
        """Start the shards of a model, whose first file is ``file``."""
        settings, number = self._settings, next(self._starts)
        flags = settings.flags_of(entry, file)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", entry.name)
        return RunningModel(
            [
                ShardProcess(f"{name}-{shard}", settings.folder / f"{number}-{shard}.sock", flags, reads_errors=True)
                for shard in range(settings.shards)
            ],
            self._addresses,
        )

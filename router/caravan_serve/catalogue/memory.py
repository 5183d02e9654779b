"""What models take, and what is free for them."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caravan_models.errors import FetchError
from caravan_models.fetching import fetch
from caravan_models.progress import OnProgress, ignore_progress
from caravan_models.reference import LocalFile, parse_reference
from caravan_proto.host_memory import available_memory
from caravan_scheduler.residency import HOST, ModelNeed, Phase, Room
from caravan_serve.catalogue.entries import CatalogueEntry
from caravan_serve.catalogue.host import HostSettings
from caravan_serve.shard_process import environment

# What a load leaves free on this host, for what everybody else may need meanwhile.
MARGIN_BYTES = 256 << 20


class MemoryProblem(Exception):
    """The model's file cannot be used, or what it takes cannot be found out."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The first file of a model that is here, and what it takes by place. ``mapped_bytes``: of the host's, those of the
    file itself, which the system counts as free once they are read.
    """

    file: Path
    bytes_at: Mapping[str, int]
    mapped_bytes: int = 0


class Memory:
    """Gets models of a hub, asks the shard's program what a model would take, and the system what is free."""

    def __init__(self, host: HostSettings, budget_bytes: int | None = None, max_models: int | None = None) -> None:
        """``budget_bytes``: what all loaded models may take of this host's memory; None: what is free."""
        self._host = host
        self._budget_bytes = budget_bytes
        self._max_models = max_models
        self._mapped: dict[str, int] = {}
        # Bytes of each device that models of the catalogue may take together, as last told.
        self._devices: dict[str, int] = {}

    async def prepare(
        self, entry: CatalogueEntry, loaded: Sequence[ModelNeed], on_progress: OnProgress = ignore_progress
    ) -> Prepared:
        """Return the files of a model, downloaded if needed, and what it takes beside those that are ``loaded``.

        Raises MemoryProblem.
        """
        file = await self._file_of(entry, on_progress)
        if entry.memory_bytes is not None:
            return Prepared(file, {HOST: entry.memory_bytes})
        told = await _estimate(self._host.flags_of(entry, file))
        if told["host_bytes"] is None:
            raise MemoryProblem("this build of llama.cpp does not report what a model takes: set memory_mib")
        shards = self._host.shards
        for name, free in told["free"]["devices"].items():
            self._devices[name] = free + sum(need.bytes_at.get(name, 0) for need in loaded)
        self._mapped[entry.name] = shards * told["parts"][HOST].get("mapped_weights", 0)
        host_bytes = told["host_bytes"] + told["saved_prefixes_bytes"]
        return Prepared(file, {place: shards * size for place, size in {HOST: host_bytes, **told["devices"]}.items()})

    async def _file_of(self, entry: CatalogueEntry, on_progress: OnProgress) -> Path:
        try:
            reference = parse_reference(entry.source)
            if not isinstance(reference, LocalFile):
                return (await fetch(reference, on_progress)).model
        except FetchError as error:
            raise MemoryProblem(str(error)) from error
        if not await asyncio.to_thread(reference.path.is_file):
            raise MemoryProblem(f"there is no file {reference.path}")
        return reference.path

    def room(self, needs: Sequence[ModelNeed]) -> Room:
        """Return what is free for the models that are not loaded."""
        there = [need for need in needs if need.phase is not Phase.COLD]
        free = {
            name: total - sum(need.bytes_at.get(name, 0) for need in there) for name, total in self._devices.items()
        }
        if self._budget_bytes is not None:
            free[HOST] = self._budget_bytes - sum(need.bytes_at.get(HOST, 0) for need in there)
        elif (available := available_memory()) is not None:
            free[HOST] = available - MARGIN_BYTES - sum(self._mapped.get(need.name, 0) for need in there)
        return Room(free_at=free, max_models=self._max_models)


async def _estimate(flags: Sequence[str]) -> dict[str, Any]:
    """Return what `caravan-shard --estimate` tells. Raises MemoryProblem."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "caravan_shard", "--estimate", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=environment(os.environ),
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it ended without a message"]
        raise MemoryProblem(lines[-1].removeprefix("caravan-shard: error: "))
    told: dict[str, Any] = json.loads(output)
    return told

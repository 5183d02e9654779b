"""Requests for models that may have no shard: who wants them, how long they wait, and what they fail for."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from typing import Protocol

from caravan_router.engine.absence import Absence
from caravan_router.engine.batcher import Batcher

_JOIN_POLL_S = 0.01


class KnownModels(Protocol):
    """The engines of a fleet."""

    def engine(self, name: str) -> Batcher | None:
        """Return the engine of the model of this name; None if it is not known yet."""
        ...

    def batchers(self, name: str) -> list[Batcher]:
        """Return all engines of a name, those that only have requests left included."""
        ...


class Demand:
    """Knows which models are wanted. A model may be so before its first shard has joined, and between two of them."""

    def __init__(self, models: KnownModels, absence: Absence) -> None:
        """``absence``: of models for which nothing else is said."""
        self._models = models
        self._default = absence
        self._absences: dict[str, Absence] = {}
        # Requests that wait until a model is known, by its name.
        self._awaited: Counter[str] = Counter()
        # Set when a model becomes known, or what holds while it is absent, and then replaced.
        self._news = asyncio.Event()

    async def wait_for_model(self, name: str) -> None:
        """Wait until the model of this name is known, "" for any. Raises NoShardError if it is not in time."""
        began_s = time.monotonic()
        self._awaited[name] += 1
        try:
            while self._models.engine(name) is None:
                absence = self._absences.get(name, self._default)
                left_s = absence.grace_s - (time.monotonic() - began_s)
                if left_s <= 0:
                    raise absence.error(name)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if left_s == math.inf else left_s):
                        await self._news.wait()
        finally:
            self._awaited[name] -= 1

    async def known(self, name: str) -> Batcher:
        """Wait until the model of this name is known, however long it takes, and return its engine."""
        while (batcher := self._models.engine(name)) is None:
            await self._news.wait()
        return batcher

    def note_model(self, batcher: Batcher) -> None:
        """Let those who wait for a model know that it is known."""
        if (absence := self._absences.get(batcher.model.name)) is not None:
            batcher.set_absence(absence)
        self._tell()

    def set_absence(self, name: str, absence: Absence) -> None:
        """Change how long requests of a model wait while no shard of it is up, and what they fail for."""
        self._absences[name] = absence
        for batcher in self._models.batchers(name):
            batcher.set_absence(absence)
        self._tell()

    def exists(self, name: str) -> bool:
        """Whether requests for the model of this name wait or run."""
        return self._awaited[name] > 0 or any(batcher.has_requests for batcher in self._models.batchers(name))

    def last_used_s(self, name: str) -> float:
        """Return when the last generation of a model was asked for, on ``time.monotonic``; 0 if none was."""
        return max((batcher.used_s for batcher in self._models.batchers(name)), default=0.0)

    async def until_serving(self, name: str) -> None:
        """Wait until a shard of the model of this name is leased."""
        while not (await self.known(name)).healthy:  # noqa: ASYNC110  once for each load
            await asyncio.sleep(_JOIN_POLL_S)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

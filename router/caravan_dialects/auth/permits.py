"""Counts concurrent generations against a limit: one pool for each API key, and one for each model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class PermitPool:
    """Each generation holds one permit while it is queued or runs. A limit of None means no limit.

    A limit that is set below the number of held permits admits nothing until enough of them are returned.
    """

    __slots__ = ("_held", "_limit")

    def __init__(self, limit: int | None) -> None:
        self._held = 0
        self.set_limit(limit)

    def set_limit(self, limit: int | None) -> None:
        self._limit = sys.maxsize if limit is None else limit

    @property
    def free(self) -> int:
        return self._limit - self._held

    def can_take(self, count: int) -> bool:
        return count <= self.free

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold ``count`` permits inside the ``with`` block. Does not check the limit: call ``can_take`` first."""
        self._held += count
        try:
            yield
        finally:
            self._held -= count


class PermitPools:
    """A pool for each model, all with the same limit: a flood of requests for one model takes no permit of another.

    Only names of models that are served may be used: the pools stay.
    """

    __slots__ = ("_limit", "_pools")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pools: dict[str, PermitPool] = {}

    def of(self, model: str) -> PermitPool:
        """Return the pool of the model of this name."""
        if model not in self._pools:
            self._pools[model] = PermitPool(self._limit)
        return self._pools[model]

    @property
    def held(self) -> int:
        """Number of permits of all models that are held."""
        return sum(self._limit - pool.free for pool in self._pools.values())

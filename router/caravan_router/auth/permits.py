"""Generations under way, counted against a limit: a key's, and the house's."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class PermitPool:
    """One permit for each generation under way, queued or running.

    None: no limit. A limit set below what is held lets nobody in until enough have left.
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
        """Held until the block is left."""
        self._held += count
        try:
            yield
        finally:
            self._held -= count

"""Whether the shard serves, drains or ends, and a way to wait for the next change."""

import asyncio
import contextlib
from enum import IntEnum


class Phase(IntEnum):
    """The phases of a shard, in order; a shard never goes back to an earlier one."""

    SERVING = 0
    DRAINING = 1  # finishes the sequences it has
    ENDED = 2  # the server is stopping


class PhaseSignal:
    """The current phase. All methods must be called on the event loop."""

    def __init__(self) -> None:
        self.current = Phase.SERVING
        self._changed = asyncio.Event()

    def advance(self, phase: Phase) -> None:
        """Enter ``phase`` and wake everybody who waits; do nothing if the shard is past it."""
        if phase > self.current:
            self.current = phase
            self._changed.set()
            self._changed = asyncio.Event()

    async def wait_for_change(self, seen: Phase, timeout_s: float) -> None:
        """Return as soon as the phase is not ``seen``, at the latest after ``timeout_s`` seconds."""
        if self.current is seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()

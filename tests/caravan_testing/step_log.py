"""A backend's hook that records every step, and holds one where a test wants to act in the middle of it."""

import contextlib
import threading
from collections.abc import AsyncIterator

from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_testing.waiting import eventually

# A test that fails while it holds a step must not hold the shard's thread for ever.
_LONGEST_HOLD_S = 60.0


class StepLog:
    """``steps``: the tokens of each step, in the order in which the steps began."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Event()

    def __call__(self, batch: TokenBatch) -> DecodeOutcome | None:
        """Record a step. Runs on the worker's thread."""
        self.steps.append(batch.tokens.tolist())
        if not self._open.is_set():
            self._held.set()
            self._open.wait(_LONGEST_HOLD_S)
            self._held.clear()
        return None

    @property
    def computed_tokens(self) -> int:
        """Number of tokens of all steps."""
        return sum(map(len, self.steps))

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Run the block during a step: the next one, which does not end before the block."""
        self._open.clear()
        try:
            await eventually(self._held.is_set, "a step began")
            yield
        finally:
            self._open.set()

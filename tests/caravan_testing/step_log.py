"""A backend's hook that records every step, and holds one where a test wants to act in the middle of it."""

import contextlib
import threading
from collections.abc import AsyncIterator

from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_testing.waiting import DEADLINE_S, eventually


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
            self._open.wait(DEADLINE_S)  # a test that fails must not hold the thread for ever
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

    async def next_step(self) -> None:
        """Let the step that is held end, and hold the next one."""
        begun = len(self.steps)
        self._open.set()
        self._open.clear()
        await eventually(lambda: len(self.steps) > begun and self._held.is_set(), "the next step began")

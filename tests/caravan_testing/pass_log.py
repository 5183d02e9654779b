"""A backend's hook that sees every pass, and holds one where a test wants to act in the middle of it."""

import contextlib
import threading
from collections.abc import AsyncIterator

from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_testing.cluster import eventually

# A test that fails while it holds a pass must not hold the shard's thread for ever.
_LONGEST_HOLD_S = 60.0


class PassLog:
    """``passes``: the tokens of each, in the order in which they began."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []
        self._open = threading.Event()
        self._open.set()
        self._held = threading.Event()

    def __call__(self, batch: TokenBatch) -> DecodeOutcome | None:
        """On the worker's thread."""
        self.passes.append(batch.tokens.tolist())
        if not self._open.is_set():
            self._held.set()
            self._open.wait(_LONGEST_HOLD_S)
            self._held.clear()
        return None

    @property
    def computed_tokens(self) -> int:
        """Of all passes."""
        return sum(map(len, self.passes))

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """The block runs while a pass does: the next one, which does not end before the block."""
        self._open.clear()
        try:
            await eventually(self._held.is_set, "a pass began")
            yield
        finally:
            self._open.set()

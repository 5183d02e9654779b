"""Lets texts to tokenize pass to the threads that shards have for them, in fair turns of the API keys."""

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from caravan_router.engine.text_gate import TextGate
from caravan_scheduler.core.engine import TEXT_SENDER
from caravan_scheduler.waiting.text_queue import TextQueue

# Longer texts take a thread of a shard for tens of milliseconds, or for seconds.
SHORT_BYTES = 16 << 10
# A shard has two threads for texts: long ones get one of them, and short ones that come meanwhile go on.
_LONG_AT_ONCE, _SHORT_AT_ONCE = 1, 4


class TextLanes:
    """Calls wait here, and not in a shard, where the first that comes would be the first served.

    ``shards`` returns how many are up. While none is, all pass, since each waits for one on its own.
    """

    def __init__(self, aging_s: float, shards: Callable[[], int]) -> None:
        self._shards = shards
        self._short = TextGate(TextQueue(aging_s), lambda: self._room(_SHORT_AT_ONCE))
        self._long = TextGate(TextQueue(aging_s), lambda: self._room(_LONG_AT_ONCE))

    def passing(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait for the turn of a call with ``size`` bytes of `TEXT_SENDER`'s text, which is under way for the block."""
        gate = self._short if size <= SHORT_BYTES else self._long
        return gate.passing(1, TEXT_SENDER.get(), cost=size)

    def _room(self, of_shard: int) -> float:
        return self._shards() * of_shard or math.inf

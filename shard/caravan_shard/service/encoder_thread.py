"""The thread that encodes media, which lives while there is something to encode."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from caravan_shard.protocol.results import Refusal
from caravan_shard.service.model_calls import ModelCalls

P = ParamSpec("P")
T = TypeVar("T")

# While steps use all cores, an encoding gets about a tenth of them.
_NICER = 10


class EncoderThread:
    """Runs calls one after another. Used on the event loop.

    OpenMP keeps a team of threads for each thread that ever computed in parallel. As soon as all teams together have
    more threads than there are cores, those of every team hardly spin at a barrier, and the steps of a small model take
    half as long again. So the thread, and with it its team, ends when nothing is left to encode.
    """

    def __init__(self, calls: ModelCalls) -> None:
        self._model_calls = calls
        self._pool: ThreadPoolExecutor | None = None
        self._calls = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | Refusal:
        """Return what ``function`` returns, which may use the model, after the calls before it."""
        pool = self._pool = self._pool or ThreadPoolExecutor(1, "media", initializer=_yield_to_steps)
        self._calls += 1
        try:
            return await self._model_calls.run(pool, function, *args, **kwargs)
        finally:
            self._calls -= 1
            if not self._calls and self._pool is pool:
                pool.shutdown(wait=False)
                self._pool = None

    def close(self) -> None:
        """End the thread, after the call that runs. The model's users are waited for before it is freed."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _yield_to_steps() -> None:
    """Let the threads of steps go first. Those that the library starts from this thread have its niceness."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)

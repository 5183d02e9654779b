"""What every handler needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from caravan_router.engine.interface import Engine
from caravan_router.http.errors import OverloadedError
from caravan_router.http.limits import Limits
from caravan_router.metrics import Metrics


class PermitPool:
    """One permit for each generation under way, queued or running."""

    def __init__(self, permits: int) -> None:
        self._free = permits

    @property
    def free(self) -> int:
        return self._free

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """All or none, at once: raises OverloadedError."""
        if count > self._free:
            raise OverloadedError
        self._free -= count
        try:
            yield
        finally:
            self._free += count


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoExtras:
    """What /info and the response headers say of the router beyond limits and model; None where it has no meaning."""

    version: str = "0"
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_size: int | None = None
    compute_type: str = "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    engine: Engine
    limits: Limits
    metrics: Metrics
    permits: PermitPool
    info: InfoExtras


STATE = web.AppKey("state", AppState)

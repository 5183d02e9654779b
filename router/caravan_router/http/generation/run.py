"""One generation from submission to last token, and its accounting. Whatever ends it, each part is released once."""

import time
from types import TracebackType
from typing import Self

from caravan_router.core.errors import EngineError
from caravan_router.core.generation import GenerationSpec
from caravan_router.http.server.errors import rendering_of
from caravan_router.http.server.state import AppState
from caravan_router.metrics.recorder import Failure, RequestTimings
from caravan_router.text.generation import Generation


class Run:
    """Use as a context manager: entering submits, leaving closes and counts. Iterate over ``pieces``."""

    __slots__ = ("_arrived", "_last_token", "_metrics", "_state", "_stops", "pieces", "spec", "tokens")

    pieces: Generation

    def __init__(self, state: AppState, spec: GenerationSpec, stops: tuple[str, ...], arrived: float) -> None:
        """``arrived``: when the request did, on ``time.monotonic``."""
        self._state = state
        self._metrics = state.metrics
        self._stops = stops
        self._arrived = arrived
        self._last_token = arrived
        self.spec = spec
        self.tokens = 0

    @property
    def seed(self) -> int | None:
        """With which the same tokens are drawn again; None when greedy."""
        sampling = self.spec.sampling
        return sampling.seed if sampling.temperature > 0 else None

    def __enter__(self) -> Self:
        self._metrics.request_validated(len(self.spec.prompt), self.spec.stopping.max_new_tokens)
        self.pieces = Generation(self._state.engine.submit(self.spec), self._stops, self._count_token)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pieces.__exit__(kind, error, trace)
        if self.pieces.finish is not None:
            self._metrics.request_succeeded(self.timings(), self.tokens)
        elif isinstance(error, EngineError):
            self._metrics.request_failed(rendering_of(error).failure or Failure.GENERATION)
        else:
            self._metrics.request_failed(Failure.DROPPED)

    def _count_token(self) -> None:
        now = time.monotonic()
        if self.tokens:
            self._metrics.observe_inter_token(now - self._last_token)
        else:
            self._metrics.observe_first_token(now - self._arrived)
        self._last_token = now
        self.tokens += 1

    def timings(self) -> RequestTimings:
        """Up to the last token. What has not happened yet took no time."""
        times = self.pieces.times
        started = self._last_token if times.started is None else times.started
        return RequestTimings(
            total_s=self._last_token - self._arrived,
            validation_s=times.submitted - self._arrived,
            queue_s=max(0.0, started - times.submitted),
            inference_s=max(0.0, self._last_token - started),
        )

"""Whether a request may begin, and what it holds while it is under way."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from caravan_router.auth.client import Client
from caravan_router.core.errors import EngineError
from caravan_router.http.server.errors import (
    KeyConcurrencyError,
    OverloadedError,
    RateLimitedError,
    RequestError,
    rendering_of,
)
from caravan_router.http.server.state import AppState
from caravan_router.metrics.recorder import Failure, Metrics


def check_rate(client: Client) -> None:
    """Counts a request against its key's rate. Raises RateLimitedError."""
    wait_s = client.take_request(time.monotonic())
    if wait_s:
        raise RateLimitedError(client.key.requests_per_minute or 0, wait_s)


@contextmanager
def admitted(state: AppState, client: Client, generations: int) -> Iterator[None]:
    """Holds a permit of the key and one of the house for each generation: all or none, at once.

    Raises RateLimitedError, KeyConcurrencyError, OverloadedError.
    """
    state.metrics.request_arrived(generations)
    with ExitStack() as held:
        with _counted(state.metrics, generations):
            held.enter_context(holding(state, client, generations))
        yield


@contextmanager
def holding(state: AppState, client: Client, permits: int) -> Iterator[None]:
    """As `admitted`, for work that the metrics do not count as generations."""
    check_rate(client)
    if not client.permits.can_take(permits):
        raise KeyConcurrencyError(client.key.concurrent_requests or 0, permits)
    if not state.permits.can_take(permits):
        raise OverloadedError
    with client.permits.take(permits), state.permits.take(permits):
        yield


@contextmanager
def validating(metrics: Metrics, generations: int) -> Iterator[None]:
    """Counts generations that end before they began."""
    try:
        with _counted(metrics, generations):
            yield
    except asyncio.CancelledError:
        metrics.request_failed(Failure.DROPPED, generations)
        raise


@contextmanager
def _counted(metrics: Metrics, generations: int) -> Iterator[None]:
    try:
        yield
    except (RequestError, EngineError) as error:
        metrics.request_failed(rendering_of(error).failure or Failure.VALIDATION, generations)
        raise

"""Admission of generations: the key's rate, permits of the key and of the model, and what fails before it runs."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from caravan_dialects.api.error_table import kind_of
from caravan_dialects.api.errors import (
    BudgetError,
    KeyConcurrencyError,
    OverloadedError,
    RateLimitedError,
    RequestError,
)
from caravan_dialects.auth.client import Client, PermitPool
from caravan_dialects.auth.key import ApiKey
from caravan_dialects.auth.usage import Period, Spent
from caravan_scheduler.core.errors import EngineError
from caravan_scheduler.core.request_metrics import Failure, RequestMetrics


def check_rate(client: Client) -> None:
    """Count a request against its key's rate. Raises RateLimitedError."""
    wait_s = client.take_request(time.monotonic())
    if wait_s:
        raise RateLimitedError(client.key.requests_per_minute or 0, wait_s)


def check_budget(key: ApiKey, spent: Spent) -> None:
    """Raise BudgetError if ``key`` has used its tokens of this day or month. What runs goes on beyond them."""
    for period, limit in ((Period.MONTH, key.tokens_per_month), (Period.DAY, key.tokens_per_day)):
        if limit is not None and spent.of(period) >= limit:
            now_s = time.time()
            raise BudgetError(limit, spent.of(period), period.value, period.next_begins(now_s), now_s)


@contextmanager
def holding_permits(client: Client, of_model: PermitPool, permits: int) -> Iterator[None]:
    """Hold ``permits`` of the key and of the model for the block. Takes all of them or none, and does not wait.

    Raises KeyConcurrencyError, OverloadedError.
    """
    if not client.permits.can_take(permits):
        raise KeyConcurrencyError(client.key.concurrent_requests or 0, permits)
    if not of_model.can_take(permits):
        raise OverloadedError
    with client.permits.take(permits), of_model.take(permits):
        yield


@contextmanager
def counting_texts(client: Client) -> Iterator[None]:
    """Count a request that only reads texts against its key's rate, and for the block as one that runs.

    Raises RateLimitedError, KeyConcurrencyError.
    """
    check_rate(client)
    if not client.permits.can_take(1):
        raise KeyConcurrencyError(client.key.concurrent_requests or 0, 1)
    with client.permits.take(1):
        yield


@contextmanager
def counting_failures(metrics: RequestMetrics, generations: int) -> Iterator[None]:
    """Count ``generations``, which are not submitted yet, as failed if the block raises."""
    try:
        yield
    except (RequestError, EngineError) as error:
        metrics.request_failed(kind_of(error).failure or Failure.VALIDATION, generations)
        raise
    except asyncio.CancelledError:
        metrics.request_failed(Failure.DROPPED, generations)
        raise

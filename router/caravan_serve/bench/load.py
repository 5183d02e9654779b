"""Sends requests in a closed loop, with a fixed number running, or in an open loop, at random times."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from caravan_serve.bench.client_sse import SseClient
from caravan_serve.bench.request import BenchRequest, RequestResult
from caravan_serve.bench.words import seeded

OnDone: TypeAlias = Callable[[RequestResult], None]


async def closed_loop(
    client: SseClient, requests: Sequence[BenchRequest], *, concurrency: int, on_done: OnDone
) -> list[RequestResult]:
    """Run ``concurrency`` workers, each of which sends its next request when the previous one has ended."""
    waiting = iter(requests)
    results: list[RequestResult] = []

    async def work() -> None:
        for request in waiting:
            result = await client.run(request)
            results.append(result)
            on_done(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
    return results


async def open_loop(
    client: SseClient, requests: Sequence[BenchRequest], *, arrivals: Sequence[float], on_done: OnDone
) -> list[RequestResult]:
    """Send each request at its time in ``arrivals``, in seconds from now, however many are still running."""
    start = time.perf_counter()
    results: list[RequestResult] = []

    async def send(request: BenchRequest, scheduled: float) -> None:
        result = await client.run(request, scheduled=scheduled)
        results.append(result)
        on_done(result)

    async with asyncio.TaskGroup() as group:
        for request, arrival in zip(requests, arrivals, strict=True):
            await asyncio.sleep(start + arrival - time.perf_counter())
            group.create_task(send(request, start + arrival))
    return results


def poisson_arrivals(count: int, *, rate: float, seed: int) -> tuple[float, ...]:
    """Return ``count`` arrival times in seconds, at ``rate`` per second on average."""
    rng = seeded(f"arrivals {seed}")
    arrivals: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return tuple(arrivals)

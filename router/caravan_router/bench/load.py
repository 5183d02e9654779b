"""How requests arrive: closed loop (as many as run at once) or open loop (when a Poisson clock says so)."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from caravan_router.bench.request import BenchRequest, RequestResult
from caravan_router.bench.words import seeded


class Client(Protocol):
    """Runs one request to its end."""

    async def run(self, request: BenchRequest, *, scheduled: float | None = None) -> RequestResult: ...


OnDone: TypeAlias = Callable[[RequestResult], None]


async def closed_loop(
    client: Client, requests: Sequence[BenchRequest], *, concurrency: int, on_done: OnDone
) -> list[RequestResult]:
    """``concurrency`` workers, each sending its next request when the last has ended."""
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
    client: Client, requests: Sequence[BenchRequest], *, arrivals: Sequence[float], on_done: OnDone
) -> list[RequestResult]:
    """Send each request at its own time, however many are still running."""
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
    """``count`` arrival times in seconds from the start, at ``rate`` per second on average."""
    rng = seeded(f"arrivals {seed}")
    arrivals: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return tuple(arrivals)

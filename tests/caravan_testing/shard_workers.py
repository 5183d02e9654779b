"""Workers over toy backends, and what they answer."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from caravan_shard.backends.base import Backend
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.replies import Replies
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.results import Result
from caravan_shard.sequences.runs import RunStore
from caravan_testing.waiting import eventually, in_time


def make_runs(_backend: Backend) -> RunStore:
    return RunStore(1 << 30)


@asynccontextmanager
async def worker_on(backend: ToyBackend) -> AsyncIterator[tuple[Worker, Engine]]:
    worker = Worker(lambda: backend, 1, make_runs)
    engine = await worker.start()
    try:
        yield worker, engine
    finally:
        await worker.stop(5.0)


async def all_of(replies: Replies) -> list[Result]:
    results: list[Result] = []
    async with in_time("all results"):
        while (together := await replies.next()) is not None:
            results += together
    return results


async def until(condition: Callable[[], bool]) -> None:
    await eventually(condition)

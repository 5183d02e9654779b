"""The generations of one request: started in one turn of the loop, read at once, ended together."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run
from caravan_router.http.server.state import AppState
from caravan_router.text.assembler import Piece

T = TypeVar("T")


@contextmanager
def started(state: AppState, requests: Sequence[ValidRequest], arrived: float) -> Iterator[list[Run]]:
    """The candidates of each prompt, prompt by prompt. However the block is left, all of them end."""
    with ExitStack() as stack:
        # No await in between: the engine computes what these share once.
        yield [
            stack.enter_context(Run(state, spec, request.stops, arrived))
            for request in requests
            for spec in request.specs
        ]


async def work_on_all(runs: Sequence[Run], work: Callable[[int, Run], Awaitable[None]]) -> None:
    """``work`` on every run, `together`."""
    if len(runs) == 1:
        await work(0, runs[0])
        return

    await together([work(index, run) for index, run in enumerate(runs)])


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """All at once; the first error cancels the others and is raised as it is."""

    async def one(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(awaitable)) for awaitable in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def collect(runs: Sequence[Run]) -> list[list[Piece]]:
    """All pieces of each run."""
    collected: list[list[Piece]] = [[] for _ in runs]

    async def read(index: int, run: Run) -> None:
        async for pieces in run.pieces:
            collected[index].extend(pieces)

    await work_on_all(runs, read)
    return collected

"""Does the same work on many items, a few at a time, with results in the order of the items."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

# Shards tokenize on two threads each. A few more calls are under way, so that none of these threads waits for the next.
AT_ONCE = 8


async def ahead(
    items: Iterable[S], work: Callable[[S], Awaitable[T]], at_once: int = AT_ONCE
) -> AsyncGenerator[T, None]:
    """Yield the result of ``work`` for each item in their order, while up to ``at_once`` items are worked on.

    Of several errors, that of the earliest item is raised, whichever came first. The work on all others is cancelled
    then, and when the generator is closed.
    """
    rest, tasks = iter(items), deque[asyncio.Task[T]]()

    async def one(item: S) -> T:
        return await work(item)

    try:
        while True:
            tasks.extend(asyncio.create_task(one(item)) for item in islice(rest, at_once - len(tasks)))
            if not tasks:
                return
            result = await tasks[0]
            del tasks[0]
            yield result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def each(items: Sequence[S], work: Callable[[S], Awaitable[T]]) -> list[T]:
    """Return the results of `ahead` for all items."""
    if len(items) == 1:
        # Most requests have one text, which needs no task.
        return [await work(items[0])]
    return [result async for result in ahead(items, work)]

"""Tells a client how far the computation of its prompt is, before the first token."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

from caravan_dialects.api.generation.run import Run
from caravan_dialects.text.assembler import Piece

# A client shows a bar: more often is of no use to it.
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """``processed`` of a prompt's ``total`` tokens are computed, with the ``cache`` that were in the cache."""

    total: int
    cache: int
    processed: int
    time_ms: float


async def with_progress(
    run: Run, tell: Callable[[PromptProgress], Awaitable[None]]
) -> AsyncIterator[Iterator[list[Piece]]]:
    """Yield what ``run`` yields. Before that, ``tell`` gets each progress that is seen. Raises EngineError.

    The first that is told has nothing but what was in the cache.
    """
    told: int | None = None
    iterator = aiter(run)
    first = asyncio.ensure_future(anext(iterator))
    try:
        while not first.done():
            await asyncio.wait({first}, timeout=_LOOK_S)
            # All of it is computed when there is a token.
            computed = len(run.spec.prompt) if first.done() and not _failed(first) else run.prompt_computed
            if computed and told is None:
                told = run.cached_tokens
                await tell(_progress(run, told))
            if told is not None and computed > told:
                told = computed
                await tell(_progress(run, computed))
        yield first.result()
    finally:
        first.cancel()
    async for ready in iterator:
        yield ready


def _failed(first: "asyncio.Future[Iterator[list[Piece]]]") -> bool:
    return first.cancelled() or first.exception() is not None


def _progress(run: Run, computed: int) -> PromptProgress:
    started = run.times.started
    return PromptProgress(
        total=len(run.spec.prompt),
        cache=run.cached_tokens,
        processed=computed,
        time_ms=0.0 if started is None else 1000 * (time.monotonic() - started),
    )

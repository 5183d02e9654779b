"""Streams that have no end of their own: they end with the server, which they would else hold up."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from aiohttp import web

from caravan_router.http.server.state import ENDING

T = TypeVar("T")


@contextlib.asynccontextmanager
async def until_the_end(request: web.Request, items: AsyncGenerator[T, None]) -> AsyncIterator[AsyncIterator[T]]:
    """Give ``items``, which never end, until the server ends. Close them."""
    async with contextlib.aclosing(items), contextlib.aclosing(_until_the_end(request, items)) as found:
        yield found


async def _until_the_end(request: web.Request, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    ending = asyncio.create_task(request.app[ENDING].wait())
    coming = asyncio.ensure_future(anext(items))
    try:
        while True:
            await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return
            yield coming.result()
            coming = asyncio.ensure_future(anext(items))
    finally:
        ending.cancel()
        coming.cancel()
        await asyncio.wait({coming})

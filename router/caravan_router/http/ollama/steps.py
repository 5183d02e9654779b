"""Tells how far an operator's work on the catalogue is, in lines of JSON."""

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import CatalogueRefusalError
from caravan_dialects.api.ollama.schema import OllamaPullReply
from caravan_dialects.api.stream import LINES
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.state import STATE
from caravan_scheduler.core.catalogue import PullProgress


async def send_steps(
    request: web.Request, steps: AsyncGenerator[OllamaPullReply, None], *, streamed: bool
) -> web.StreamResponse:
    """Send a line for each step, or only the last one, once all is done.

    Raises CatalogueRefusalError where that can still be told by the status; later it is the last line.
    """
    async with contextlib.aclosing(steps):
        last = await anext(steps)
        if not streamed:
            async for step in steps:
                last = step
            return json_reply(last)
        async with EventStream(request, {}, request.app[STATE].limits, LINES) as events:
            await events.send(msgspec.json.encode(last))
            try:
                async for step in steps:
                    await events.send(msgspec.json.encode(step))
            except CatalogueRefusalError as error:
                await events.send(msgspec.json.encode({"error": str(error)}))
        return events.response


def step_of(progress: PullProgress) -> OllamaPullReply:
    """Return the line that tells how far a download is."""
    what = "verifying" if progress.is_checking else "pulling"
    return OllamaPullReply(
        status=f"{what} {progress.digest[:12]}",
        digest=f"sha256:{progress.digest}",
        total=progress.size,
        completed=progress.done,
    )

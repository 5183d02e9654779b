"""Sends traces while the router runs. OpenTelemetry is imported only if they are sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from caravan_router.tracing.settings import TraceSettings
from caravan_scheduler.core.trace import Tracing


@asynccontextmanager
async def tracing(settings: TraceSettings | None) -> AsyncIterator[Tracing | None]:
    """Send traces while the block runs; None without settings. The end takes at most a few seconds."""
    if settings is None:
        yield None
        return
    from caravan_router.tracing.export import SpanSender
    from caravan_router.tracing.spans import OpenTelemetry

    sender = await asyncio.to_thread(SpanSender, settings)
    try:
        yield OpenTelemetry(sender.provider)
    finally:
        await asyncio.to_thread(sender.close)

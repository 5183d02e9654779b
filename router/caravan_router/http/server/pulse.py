"""Keeps a stream alive while there is nothing to send, and cuts off a client that reads nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from caravan_dialects.api.limits import Limits


class Pulse:
    """The times of the writes to one client, in seconds on ``time.monotonic``.

    ``written_at``: when the last write began. ``blocked_since``: when the current one began; None between writes.
    """

    def __init__(
        self, request: web.Request, limits: Limits, keep_alive: Callable[[], Awaitable[object]] | None
    ) -> None:
        """``keep_alive``: sends something that the client ignores; None if there is no such thing."""
        self._request = request
        self._limits = limits
        self._keep_alive = keep_alive
        self.written_at = time.monotonic()
        self.blocked_since: float | None = None

    async def run(self) -> None:
        """Watch the writes until cancelled, or the client is gone."""
        tick_s = min(self._limits.keep_alive_s, self._limits.slow_client_timeout_s) / 4
        while (transport := self._request.transport) is not None:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if self.blocked_since is not None:
                if now - self.blocked_since >= self._limits.slow_client_timeout_s:
                    transport.abort()
                    return
            elif (
                self._keep_alive is not None
                and now - self.written_at >= self._limits.keep_alive_s
                and transport.get_write_buffer_size() == 0
            ):
                # The buffer is empty, so this write does not wait.
                with suppress(ConnectionError):
                    await self._keep_alive()
                self.written_at = now

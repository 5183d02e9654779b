"""Renders chat templates in child processes, which may be killed at any time."""

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from caravan_router.chat.call_form import CallForms
from caravan_router.chat.template_errors import TemplateError, TemplateOutputError, TemplateStoppedError
from caravan_router.chat.template_messages import LENGTH_BYTES, RenderReply, RenderRequest, framed
from caravan_router.chat.tool_derivation import ToolFormats

# With two, a template that uses up its time does not stop other conversations.
_PROCESSES = 2
_TIME_LIMIT_S = 2.0
# Extra time before a process that should have ended itself, but is stopped or starved of CPU, is killed.
_GRACE_S = 3.0
# Extra time for the first rendering of a process, which includes its start.
_START_S = 20.0
MAX_SOURCE_BYTES = 256 << 10

_DECODER = msgspec.json.Decoder(RenderReply)


class TemplateRenderer:
    """Starts processes when they are first needed, keeps them until ``close``, and replaces those that died."""

    def __init__(self, time_limit_s: float = _TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._turns = asyncio.Semaphore(_PROCESSES)
        self._idle: list[asyncio.subprocess.Process] = []
        self._closed = False
        # How the models of the templates write calls of tools, and how the templates want those of earlier turns.
        self.tool_formats = ToolFormats(self.render)
        self.call_forms = CallForms(self.render)

    async def render(self, source: str, variables: Mapping[str, Any], max_bytes: int) -> str:
        """Render ``source`` to at most ``max_bytes`` bytes of text. Raises TemplateError."""
        size = len(source.encode())
        if size > MAX_SOURCE_BYTES:
            raise TemplateError(f"its source must have at most {MAX_SOURCE_BYTES} bytes. Given: {size}")
        request = RenderRequest(
            source=source, variables=dict(variables), time_limit_s=self._time_limit_s, max_bytes=max_bytes
        )
        async with self._turns:
            reply = await self._ask(framed(request))
        if reply.given_bytes is not None:
            raise TemplateOutputError(max_bytes, reply.given_bytes)
        if reply.text is None:
            raise TemplateError(reply.problem or "it gave no text")
        return reply.text

    async def close(self) -> None:
        """End all processes. Call this when nothing is being rendered any more."""
        self._closed = True
        while self._idle:
            await _end(self._idle.pop())

    async def _ask(self, request: bytes) -> RenderReply:
        """Send ``request`` to an idle process, or to a new one. Raises TemplateError if the process ends or hangs."""
        new = not self._idle
        process = await _start() if new else self._idle.pop()
        answered = False
        try:
            async with asyncio.timeout(self._time_limit_s + _GRACE_S + (_START_S if new else 0)):
                reply = await _exchange(process, request)
            answered = True
        except (TimeoutError, EOFError, ConnectionError):
            raise TemplateStoppedError(
                f"it did not end within {self._time_limit_s:g} s, or needed too much memory"
            ) from None
        finally:
            # A process without a reply still renders, also after the client has left: it cannot serve the next request.
            if answered and not self._closed:
                self._idle.append(process)
            else:
                await _end(process)
        return reply


async def _start() -> asyncio.subprocess.Process:
    # The process gets no more of the environment than it needs, so that no template can read keys or tokens in it.
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "TZ") if name in os.environ}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "caravan_router.chat.template_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        # Ctrl-C is for the router, which drains first.
        start_new_session=True,
    )


async def _exchange(process: asyncio.subprocess.Process, request: bytes) -> RenderReply:
    """Send one request and read its reply. Raises EOFError or ConnectionError if the process ends before it replies."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return _DECODER.decode(await process.stdout.readexactly(int.from_bytes(head, "big")))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    # Read the rest of the output and close the pipes.
    await process.communicate()

"""Renders chat templates in child processes, which may be killed at any time."""

from collections.abc import Mapping
from typing import Any

import msgspec

from caravan_dialects.chat.template_messages import (
    RenderReply,
    RenderRequest,
    TemplateError,
    TemplateOutputError,
    TemplateStoppedError,
)
from caravan_dialects.chat.template_probes import CallForms, ContentForms, make_room
from caravan_dialects.chat.tool_derivation import ToolFormats
from caravan_dialects.guarded_process import GuardedProcesses, ProcessEndedError, Worker
from caravan_scheduler.core.errors import HelperError

# With two, a template that uses up its time does not stop other conversations.
_PROCESSES = 2
_TIME_LIMIT_S = 2.0
# Four times the processor time, for hosts that have no processor free.
_GRACE_S = 6.0
MAX_SOURCE_BYTES = 256 << 10

_DECODER = msgspec.json.Decoder(RenderReply)


class TemplateRenderer:
    """Renders with a few processes, which it starts when they are first needed and keeps until ``close``."""

    def __init__(self, time_limit_s: float = _TIME_LIMIT_S, grace_s: float = _GRACE_S) -> None:
        self._time_limit_s = time_limit_s
        # The names of the variables that each template reads.
        self._names: dict[str, frozenset[str]] = {}
        self.processes = GuardedProcesses(
            Worker(
                module="caravan_dialects.chat.template_process",
                processes=_PROCESSES,
                time_limit_s=time_limit_s,
                grace_s=grace_s,
            )
        )
        # How the models of the templates write calls of tools, and how the templates want those of earlier turns.
        self.tool_formats = ToolFormats(self.render)
        self.call_forms = CallForms(self.render)
        # How the templates want the contents of messages.
        self.content_forms = ContentForms(self.render)

    async def render(self, source: str, variables: Mapping[str, Any], max_bytes: int) -> str:
        """Render ``source`` to at most ``max_bytes`` bytes of text. Raises TemplateError, HelperError."""
        reply = await self._ask(RenderRequest(source=source, variables=dict(variables), max_bytes=max_bytes))
        if reply.given_bytes is not None:
            raise TemplateOutputError(max_bytes, reply.given_bytes)
        if reply.text is None:
            raise TemplateError(reply.problem or "it gave no text")
        return reply.text

    async def names(self, source: str) -> frozenset[str]:
        """Return the names of the variables that ``source`` reads. Raises TemplateError, HelperError."""
        if source not in self._names:
            reply = await self._ask(RenderRequest(source=source, variables={}, max_bytes=0, names=True))
            if reply.names is None:
                raise TemplateError(reply.problem or "it gave no names")
            make_room(self._names)
            self._names[source] = frozenset(reply.names)
        return self._names[source]

    async def _ask(self, request: RenderRequest) -> RenderReply:
        size = len(request.source.encode())
        if size > MAX_SOURCE_BYTES:
            raise TemplateError(f"its source must have at most {MAX_SOURCE_BYTES} bytes. Given: {size}")
        try:
            return _DECODER.decode(await self.processes.ask(msgspec.json.encode(request)))
        except ProcessEndedError as error:
            if not error.blames_request:
                raise HelperError(f"Chat templates cannot be rendered at present: {error}") from None
            raise TemplateStoppedError(
                f"it did not end within {self._time_limit_s:g} s, or needed too much memory"
            ) from None

    async def close(self) -> None:
        """End all processes. Call this when nothing is being rendered any more."""
        await self.processes.close()

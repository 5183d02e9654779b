"""Finds out in which form a chat template reads the content of messages.

Most templates want a text. Some, of models that see, read a list of parts only: of a text they would show nothing.
"""

from collections.abc import Sequence
from typing import Any

from caravan_dialects.chat.template_errors import TemplateStoppedError
from caravan_dialects.chat.tool_probes import CONTENT, Render, make_room, rendered

Json = dict[str, Any]


class ContentForms:
    """Whether templates want parts. Each template is examined once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._wants_parts: dict[str, bool] = {}

    async def of(self, source: str, messages: Sequence[Json]) -> list[Json]:
        """Return ``messages``, whose contents are texts, in the form that the template ``source`` reads."""
        if not await self._wants(source):
            return list(messages)
        return [
            message | {"content": _parts_of(content)} if isinstance(content := message["content"], str) else message
            for message in messages
        ]

    async def _wants(self, source: str) -> bool:
        if source not in self._wants_parts:
            # A template that tells parts apart has this word.
            found = False
            if "type" in source:
                try:
                    found = not await self._shows(source, CONTENT) and await self._shows(source, _parts_of(CONTENT))
                except TemplateStoppedError:
                    # Perhaps the host was busy: the next request tries again.
                    return False
            make_room(self._wants_parts)
            self._wants_parts[source] = found
        return self._wants_parts[source]

    async def _shows(self, source: str, content: str | list[Json]) -> bool:
        variables: Json = {
            "messages": [{"role": "user", "content": content}],
            "bos_token": "",
            "eos_token": "",
            "add_generation_prompt": True,
        }
        return CONTENT in (await rendered(self._render, source, variables) or "")


def _parts_of(content: str) -> list[Json]:
    return [{"type": "text", "text": content}]

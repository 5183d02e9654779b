"""Finds out in which form a chat template shows the calls of earlier turns.

Clients send the arguments as JSON, and no content beside a call. Most templates want the arguments as an object, and an
empty content. Some drop the calls of a message whose content is not null, or cannot write an object.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from caravan_dialects.chat.template_errors import TemplateStoppedError
from caravan_dialects.chat.tool_probes import NAMES, TEXT, TEXT_KEY, Render, conversation, make_room, rendered

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """``as_text``: arguments are JSON in a string. ``null``: content is null, if a call is all that a message has."""

    as_text: bool = False
    null: bool = False

    def of(self, messages: Sequence[Json]) -> list[Json]:
        """Return ``messages`` with their calls in this form."""
        return [self._message(message) if message.get("tool_calls") else message for message in messages]

    def _message(self, message: Json) -> Json:
        if self.null and not message["content"]:
            message = message | {"content": None}
        if self.as_text:
            message = message | {"tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        return message


_FORMS = tuple(CallForm(as_text=as_text, null=null) for as_text in (False, True) for null in (False, True))


class CallForms:
    """The forms for templates. Each template is examined once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._forms: dict[str, CallForm] = {}

    async def of(self, source: str) -> CallForm:
        """Return the first form in which the template ``source`` shows a call; if it does in none, the usual one."""
        if source not in self._forms:
            try:
                found = await self._shown(source)
            except TemplateStoppedError:
                # Perhaps the host was busy: the next request tries again.
                return CallForm()
            make_room(self._forms)
            self._forms[source] = found
        return self._forms[source]

    async def _shown(self, source: str) -> CallForm:
        if "tool_calls" in source:
            for form in _FORMS:
                variables = conversation(1, content=False, as_text=False)
                variables["messages"] = form.of(variables["messages"])
                text = await rendered(self._render, source, variables)
                if text is not None and _shows_call(text):
                    return form
        return CallForm()


def _shows_call(text: str) -> bool:
    # Python's repr of an object is no JSON, and a string that is serialized again has its quotes escaped.
    wrong = (f"'{TEXT_KEY}'", f'\\"{TEXT_KEY}\\"')
    return all(word in text for word in (NAMES[0], TEXT_KEY, TEXT)) and not any(word in text for word in wrong)


def _with_text(call: Json) -> Json:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call | {"function": function | {"arguments": text}}

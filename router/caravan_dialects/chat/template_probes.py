"""What known conversations show about a chat template: how it reads contents and the calls of earlier turns.

Clients send the arguments of calls as JSON, and no content beside a call. Most templates want the arguments as an
object, and an empty content. Some drop the calls of a message whose content is not null, or cannot write an object.
Most want a text as content. Some, of models that see, read a list of parts only: of a text they would show nothing.
"""

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from caravan_dialects.chat.template_messages import TemplateError, TemplateStoppedError

Json = dict[str, Any]

# Templates with documentation of their own are longer than any conversation with two calls.
_MAX_BYTES = 1 << 20
# A router serves few models, but may serve others later.
_KEPT = 64

# Words that no template contains.
USER, CONTENT = "qzuserq", "qzcontentq"
NAMES = ("qzalphaq", "qzbetaq")
IDS = ("qzidaaaa1", "qzidbbbb2")
TEXT_KEY, TEXT = "qzkeyaq", "qzvaluetextq"
# One argument of each type, in JSON's words. Keys are in alphabetical order, which some templates write.
VALUES: dict[str, tuple[str, Any]] = {
    "string": (TEXT_KEY, TEXT),
    "integer": ("qzkeybq", 90817263),
    "number": ("qzkeycq", 9081.7263),
    "boolean": ("qzkeydq", True),
    "array": ("qzkeyeq", [90817264]),
    "object": ("qzkeyfq", {"qzinnerq": 90817265}),
}
# A text without the characters that templates escape, and numbers: what the first call has.
PLAIN = ("string", "integer")


class Render(Protocol):
    """Renders a template. Raises TemplateError."""

    def __call__(self, source: str, variables: Mapping[str, Any], max_bytes: int) -> Awaitable[str]: ...


async def rendered(render: Render, source: str, variables: Json) -> str | None:
    """Return what the template ``source`` makes of known calls; None if it refuses. Raises TemplateStoppedError."""
    try:
        return await render(source, variables, _MAX_BYTES)
    except TemplateStoppedError:
        raise
    except TemplateError:
        return None


def make_room(found: dict[Any, Any]) -> None:
    """Drop the oldest of what was found out about templates, if that is much."""
    if len(found) >= _KEPT:
        found.pop(next(iter(found)))


@dataclass(frozen=True, slots=True)
class Probes:
    """What a template made of the same turn with no call, one, two, and one with an argument of each type.

    None: it refused.
    """

    none: str | None
    one: str | None
    two: str | None
    typed: str | None


def arguments_of(*kinds: str) -> Json:
    """Return an argument of each type in ``kinds``."""
    return dict(VALUES[kind] for kind in kinds)


def conversation(calls: int, kinds: tuple[str, ...] = PLAIN, *, content: bool, as_text: bool) -> Json:
    """Return a template's variables for a turn with ``calls`` calls.

    ``content``: the turn has a text, too. ``as_text``: arguments are JSON in a string.
    """
    reply: Json = {"role": "assistant", "content": CONTENT if content or not calls else ""}
    if calls:
        reply["tool_calls"] = [_call(number, kinds, as_text=as_text) for number in range(calls)]
    return {
        "messages": [{"role": "user", "content": USER}, reply],
        "tools": [_tool(name) for name in NAMES],
        "documents": None,
        "bos_token": "",
        "eos_token": "",
        "add_generation_prompt": False,
    }


def _call(number: int, kinds: tuple[str, ...], *, as_text: bool) -> Json:
    # The template's own rendering of the arguments must be told from a client's: keys and values are as given.
    arguments: Any = arguments_of(*kinds)
    if as_text:
        pairs = ", ".join(f'"{key}": {_json(value)}' for key, value in arguments.items())
        arguments = f"{{{pairs}}}"
    return {"id": IDS[number], "type": "function", "function": {"name": NAMES[number], "arguments": arguments}}


def _json(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _tool(name: str) -> Json:
    properties: Json = {key: {"type": kind, "description": "-"} for kind, (key, _) in VALUES.items()}
    properties[VALUES["array"][0]]["items"] = {"type": "integer"}
    properties[VALUES["object"][0]]["additionalProperties"] = {"type": "integer"}
    parameters = {"type": "object", "properties": properties, "required": [TEXT_KEY]}
    return {"type": "function", "function": {"name": name, "description": "-", "parameters": parameters}}


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

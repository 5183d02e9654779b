"""Conversations with known calls: what a template makes of them shows how its model writes calls."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from caravan_dialects.chat.template_errors import TemplateError, TemplateStoppedError

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

"""Names of tools: what a client calls a tool, and the one name by which the model knows it.

Models and their templates know no namespaces, so a tool of a namespace has both names in one.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from caravan_dialects.api.openai.chat.tools import FUNCTION_NAME

_MOST_CHARACTERS = 64
_DIGEST_CHARACTERS = 8
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]", re.ASCII)


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a client calls a tool. ``namespace``: None for a tool that is in none."""

    name: str
    namespace: str | None = None


def model_names(tools: Collection[ToolName]) -> dict[ToolName, str]:
    """Return the name by which the model knows each of ``tools``, which all differ. No two names are the same.

    A tool outside of namespaces keeps its name, and no name depends on the order: a prompt begins with the tools, and
    would not be found in the cache if one of them changed its name.
    """
    wanted = Counter(map(_joined, tools))
    names = {
        tool: _joined(tool)
        for tool in tools
        if FUNCTION_NAME.fullmatch(_joined(tool)) and (tool.namespace is None or wanted[_joined(tool)] == 1)
    }
    taken = set(names.values())
    for tool in tools:
        if tool not in names:
            names[tool] = _unused(tool, taken)
            taken.add(names[tool])
    return names


def model_name(tool: ToolName) -> str:
    """Return the name of a tool that is offered no longer."""
    return model_names([tool])[tool]


def _joined(tool: ToolName) -> str:
    return tool.name if tool.namespace is None else f"{tool.namespace}__{tool.name}"


def _unused(tool: ToolName, taken: Iterable[str]) -> str:
    """Return a name that ends with a digest, for one that is too long, taken or has other characters."""
    start = _OTHER_CHARACTERS.sub("_", _joined(tool))[: _MOST_CHARACTERS - _DIGEST_CHARACTERS - 1]
    for attempt in itertools.count():
        source = msgspec.json.encode([tool.namespace, tool.name, attempt])
        name = f"{start}_{hashlib.sha256(source).hexdigest()[:_DIGEST_CHARACTERS]}"
        if name not in taken:
            return name
    raise AssertionError("the count has no end")

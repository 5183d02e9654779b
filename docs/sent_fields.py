"""The fields that agents and client libraries send, by dialect, and what becomes of each.

`sent_fields.json` has them by sender and version, as the senders' requests and types were recorded. What becomes of a
field is read from the type of the body and its marks.
"""

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from msgspec import inspect

from caravan_dialects.api.anthropic.schema import MessagesRequest
from caravan_dialects.api.gemini.schema import GenerateContentRequest
from caravan_dialects.api.generation.schema import NEUTRAL, NO_EFFECT, REFUSED
from caravan_dialects.api.ollama.schema import OllamaChatRequest
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.responses.schema import ResponseRequest

_RECORDED = Path(__file__).with_name("sent_fields.json")
BODIES: dict[str, type[Any]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
    "messages": MessagesRequest,
    "gemini": GenerateContentRequest,
    "ollama": OllamaChatRequest,
}


class Fate(Enum):
    """What becomes of a field."""

    HONORED = "honored"
    IGNORED = "ignored"
    REFUSED = "refused, unless the value changes nothing"


def recorded(dialect: str) -> dict[str, list[str]]:
    """Return the paths of fields by sender, such as "tools[].name"."""
    return {sender: paths.split() for sender, paths in json.loads(_RECORDED.read_text())[dialect].items()}


def fates(dialect: str) -> dict[str, Fate]:
    """Return what becomes of each recorded field. What is in a field that is not honored is left out."""
    found: dict[str, Fate] = {}
    for path in sorted({path for paths in recorded(dialect).values() for path in paths}):
        parent, dot, _ = path.rpartition(".")
        if dot and found.get(parent.removesuffix("[]"), Fate.HONORED) is not Fate.HONORED:
            continue
        fate = _fate(inspect.type_info(BODIES[dialect]), path.replace("[]", "").split("."))
        if fate is not None:
            found[path] = fate
    return found


def _fate(kind: inspect.Type, path: list[str]) -> Fate | None:
    """Return what becomes of the field at ``path`` of a value of ``kind``; None if the value has no known fields."""
    structs = list(_structs(kind))
    if not structs:
        return None
    fields = [field for struct in structs for field in struct.fields if field.encode_name == path[0]]
    if any(struct.tag_field == path[0] for struct in structs):
        return Fate.HONORED
    if not fields:
        return Fate.IGNORED
    marks = _marks(fields[0].type)
    if NO_EFFECT in marks:
        return Fate.IGNORED
    if NEUTRAL in marks or REFUSED in marks:
        return Fate.REFUSED
    return _fate(fields[0].type, path[1:]) if path[1:] else Fate.HONORED


def _marks(kind: inspect.Type) -> dict[str, Any]:
    return kind.extra or {} if isinstance(kind, inspect.Metadata) else {}


def _structs(kind: inspect.Type) -> Iterator[inspect.StructType]:
    match kind:
        case inspect.Metadata(type=inner) | inspect.ListType(item_type=inner):
            yield from _structs(inner)
        case inspect.UnionType(types=kinds):
            for one in kinds:
                yield from _structs(one)
        case inspect.StructType():
            yield kind
        case _:
            pass


def rows(dialect: str) -> Iterator[tuple[str, str]]:
    """Yield the rows of a dialect's table: who sends fields, then those that are not honored, by their fate."""
    yield "recorded from", ", ".join(recorded(dialect))
    of = fates(dialect)
    for fate in (Fate.IGNORED, Fate.REFUSED):
        if names := [f"`{path}`" for path, one in of.items() if one is fate]:
            yield fate.value, ", ".join(names)

"""Builds the grammar, in llguidance's Lark, that an output must match when it must call a tool."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_router.chat.tool_format import ToolFormat
from caravan_router.core.engine import Engine

# White space as Python's json writes it, which is what templates show. A weak model may write optional space forever.
_LAYOUT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords that let an object have properties which its ``properties`` do not name.
_OPENING = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$ref",
    }
)
# Keywords that hold the targets of references, which must stay at the root of the schema.
_DEFINITIONS = ("$defs", "definitions")


async def tool_constraint(
    engine: Engine, tool_format: ToolFormat, functions: Mapping[str, Mapping[str, Any] | None], *, several: bool
) -> Constraint:
    """Return the constraint for one call to one of ``functions``, which maps names to the schemas of their parameters.

    With ``several`` it allows more calls if the format can express them. Raises NoShardError.
    """
    opening = await _terminal(engine, tool_format.opening) if _always_opened(tool_format) else ""
    closing = await _terminal(engine, tool_format.closing) if tool_format.closing else ""
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
    for number, (name, parameters) in enumerate(functions.items()):
        rules.append(f"call_{number}: %json {_call_schema(tool_format, name, parameters)}")
    match tool_format:
        case ToolFormat(listed=True):
            more = f" ({_quoted(', ')} call)*" if several else ""
            start = [opening, _quoted("["), f"call{more}", _quoted("]")]
        case ToolFormat(closing=""):
            start = ["call"]
        case _:
            rules.append(f"tagged: {opening} {_quoted(chr(10))} call {_quoted(chr(10))} {closing}")
            start = [f"tagged ({_quoted(chr(10))} tagged)*" if several else "tagged"]
    return Constraint(ConstraintKind.LARK, "\n".join([f"start: {' '.join(start)}", *rules]))


def _always_opened(tool_format: ToolFormat) -> bool:
    return bool(tool_format.closing) or tool_format.listed


def _call_schema(tool_format: ToolFormat, name: str, parameters: Mapping[str, Any] | None) -> str:
    arguments = _closed(parameters or _NO_PARAMETERS)
    definitions = {key: arguments.pop(key) for key in _DEFINITIONS if key in arguments}
    schema = {
        "type": "object",
        "properties": {"name": {"const": name}, tool_format.arguments_key: arguments},
        "required": ["name", tool_format.arguments_key],
        "additionalProperties": False,
        "x-guidance": _LAYOUT,
        **definitions,
    }
    return msgspec.json.encode(schema).decode()


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Allow only named properties in objects of ``schema``: a weak model could invent others without end."""
    result = dict(schema)
    if isinstance(properties := schema.get("properties"), Mapping):
        result["properties"] = {
            name: _closed(inner) if isinstance(inner, Mapping) else inner for name, inner in properties.items()
        }
        if not _OPENING & schema.keys() and properties.keys() >= set(schema.get("required", ())):
            result["additionalProperties"] = False
    if isinstance(items := schema.get("items"), Mapping):
        result["items"] = _closed(items)
    return result


async def _terminal(engine: Engine, marker: str) -> str:
    """Return ``marker`` as a Lark terminal: by its token id if it is a control token, else as a string."""
    tokens = await engine.queries.tokenize(marker, add_special=False)
    if len(tokens.token_ids) == 1 and tokens.specials[0]:
        return f"<[{tokens.token_ids[0]}]>"
    return _quoted(marker)


def _quoted(text: str) -> str:
    # Strings have the same syntax in Lark and in JSON.
    return msgspec.json.encode(text).decode()


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | None]:
    """Return the parameters' schema of each function by name. ``tools`` have OpenAI's form."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

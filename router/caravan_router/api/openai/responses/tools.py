"""The tools of a response: functions, and custom tools as functions of one text. Others are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_router.api.generation.rules import unsupported_field_error
from caravan_router.api.openai.chat.messages import MAX_DEPTH, check_depth
from caravan_router.api.openai.chat.schema import ChosenFunction, FunctionDefinition, NamedToolChoice, Tool
from caravan_router.api.openai.rules import missing_field_error

_ONE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """``tools``: for the model. ``custom``: names of those that are custom tools. ``skipped``: types left out.

    ``numbers``: which tool of the body each is, by its name.
    """

    tools: Sequence[Tool]
    custom: frozenset[str]
    skipped: frozenset[str]
    numbers: Mapping[str, int]


def offered_tools(given: Sequence[Mapping[str, Any]]) -> OfferedTools:
    """Raises ValidationError."""
    tools, custom, skipped = [], set(), set()
    numbers: dict[str, int] = {}
    for number, tool in enumerate(given):
        # Its fields may be as deep as in chat.
        check_depth(f"tools[{number}]", tool, MAX_DEPTH + 1)
        match tool:
            case {"type": "function" | "custom", "name": str()}:
                numbers[tool["name"]] = number
                tools.append(_custom(tool) if tool["type"] == "custom" else _function(f"tools[{number}]", tool))
                if tool["type"] == "custom":
                    custom.add(tool["name"])
            case {"type": "function" | "custom"}:
                raise missing_field_error(f"tools[{number}].name")
            case {"type": str(kind)}:
                skipped.add(kind)
            case _:
                raise missing_field_error(f"tools[{number}].type")
    return OfferedTools(tools=tools, custom=frozenset(custom), skipped=frozenset(skipped), numbers=numbers)


def _function(field: str, tool: Mapping[str, Any]) -> Tool:
    parameters, description = tool.get("parameters"), tool.get("description")
    if not isinstance(parameters, dict | None):
        raise unsupported_field_error(f"{field}.parameters", "send a JSON schema", parameters)
    if not isinstance(description, str | None):
        raise unsupported_field_error(f"{field}.description", "send a text", description)
    strict = tool.get("strict") is True
    return Tool(
        function=FunctionDefinition(name=tool["name"], description=description, parameters=parameters, strict=strict)
    )


def _custom(tool: Mapping[str, Any]) -> Tool:
    parts = [tool.get("description") or ""]
    match tool.get("format"):
        case {"type": "grammar", "definition": str(definition)}:
            # A grammar inside a JSON string cannot be enforced.
            parts.append(f"The input must match this grammar:\n{definition}")
        case _:
            pass
    description = "\n\n".join(str(part) for part in parts if part)
    return Tool(function=FunctionDefinition(name=tool["name"], description=description, parameters=_ONE_TEXT))


def chosen_tools(
    tools: Sequence[Tool], choice: str | Mapping[str, Any] | None
) -> tuple[Sequence[Tool], str | NamedToolChoice | None]:
    """Return the tools and ``tool_choice`` of chat completions. Raises ValidationError."""
    match choice:
        case None | "auto" | "none" | "required":
            return tools, choice
        case {"type": "function" | "custom", "name": str(name)}:
            return tools, NamedToolChoice(function=ChosenFunction(name=name))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = {tool["name"] for tool in allowed if isinstance(tool, dict) and isinstance(tool.get("name"), str)}
            return [tool for tool in tools if tool.function.name in names], mode
        case _:
            raise unsupported_field_error("tool_choice", "choose a function or custom tool by its name", choice)


def custom_arguments(given: str) -> str:
    """Return the arguments with which the model calls a custom tool."""
    return msgspec.json.encode({"input": given}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool; the arguments themselves if they are no JSON of this form."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except (msgspec.DecodeError, RecursionError):
        return arguments


class _CustomArguments(msgspec.Struct, frozen=True):
    input: str

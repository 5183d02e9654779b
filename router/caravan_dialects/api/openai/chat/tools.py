"""Finds the tools that a request may call, and whether it must call one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.api.errors import ToolError
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.messages import check_depth
from caravan_dialects.api.openai.chat.schema import ChatRequest, NamedToolChoice, Tool
from caravan_dialects.api.openai.rules import function_name_error, too_many_tools_error

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
"""OpenAI's rule for names of functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """``tools``: shown to the model. ``callable``: those it may call. ``required``: it must call one.

    ``several``: it may call more than one. ``strict``: calls must match their schemas also where none is required.
    """

    tools: Sequence[Tool] = ()
    callable: Sequence[Tool] = ()
    required: bool = False
    several: bool = True
    strict: bool = False


NO_TOOLS = ToolPlan()


def tool_plan_of(body: ChatRequest, limits: Limits) -> ToolPlan:
    """Check the tools. Raises ValidationError, ToolError."""
    tools = body.tools or []
    if len(tools) > limits.max_tools:
        raise too_many_tools_error(limits.max_tools, len(tools))
    names: set[str] = set()
    for number, tool in enumerate(tools):
        name = tool.function.name
        if not FUNCTION_NAME.fullmatch(name) or name in names:
            raise function_name_error(f"tools[{number}].function.name", name)
        names.add(name)
        check_depth(f"tools[{number}].function.parameters", tool.function.parameters or tool.function.arguments)
    several = body.parallel_tool_calls is not False
    match body.tool_choice:
        case "none":
            return NO_TOOLS
        case None | "auto":
            strict = any(tool.function.strict for tool in tools)
            return ToolPlan(tools=tools, callable=tools, several=several, strict=strict)
        case "required":
            if not tools:
                raise ToolError("`tool_choice` is `required`, but there are no `tools`")
            return ToolPlan(tools=tools, callable=tools, required=True, several=several)
        case NamedToolChoice(function=function):
            return _named(tools, function.name)
        case name:
            return _named(tools, name)


def _named(tools: Sequence[Tool], name: str) -> ToolPlan:
    chosen = [tool for tool in tools if tool.function.name == name]
    if not chosen:
        raise ToolError(f"Tool with name {name[:64]} not found")
    return ToolPlan(tools=tools, callable=chosen, required=True, several=False)

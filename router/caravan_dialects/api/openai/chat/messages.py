"""Turns a client's messages and tools into what chat templates expect, and finds the tools that it may call."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.api.errors import ToolError
from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts, text_for
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.schema import (
    ChatRequest,
    ContentPart,
    ImageUrl,
    InputAudio,
    Message,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from caravan_dialects.api.openai.rules import (
    empty_messages_error,
    function_name_error,
    missing_field_error,
    nested_error,
    too_many_tools_error,
)

Json = dict[str, Any]

MAX_DEPTH = 64
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
"""OpenAI's rule for names of functions."""


def template_messages(messages: Sequence[Message], media: MediaParts, *, developer_known: bool) -> list[Json]:
    """Return one object per message; its ``content`` is a text, with marks of pictures and sounds added to ``media``.

    Raises ValidationError.
    """
    if not messages:
        raise empty_messages_error()
    names: dict[str, str] = {}
    result = []
    for number, message in enumerate(messages):
        # Few templates have the role "developer"; "system" has the same meaning.
        role = "system" if message.role == "developer" and not developer_known else message.role
        field = f"messages[{number}]"
        content = _text(f"{field}.content", message, media)
        result.append(_template_message(field, message, {"role": role, "content": content}, names))
    return result


def _template_message(field: str, message: Message, result: Json, names: dict[str, str]) -> Json:
    """Add what a message has beside role and content. ``names``: names of the functions called so far, by call id."""
    if thought := message.reasoning_content or message.reasoning:
        result["reasoning_content"] = thought
    if message.name is not None:
        result["name"] = message.name
    if message.tool_calls:
        result["tool_calls"] = [
            _call(f"{field}.tool_calls[{number}]", number, call) for number, call in enumerate(message.tool_calls)
        ]
        names |= {call["id"]: call["function"]["name"] for call in result["tool_calls"]}
    if message.role == "tool":
        call_id = "" if message.tool_call_id is None else str(message.tool_call_id)
        result["tool_call_id"] = call_id
        if message.name is None and call_id in names:
            result["name"] = names[call_id]
    return result


def _text(field: str, message: Message, media: MediaParts) -> str:
    match message.content:
        case None:
            if message.role != "assistant":
                raise missing_field_error(field)
            return ""
        case str(text):
            return text
        case parts:
            # What the model says is text.
            own = NO_MEDIA if message.role == "assistant" else media
            return own.joined(texts_of_parts(field, parts, own))


def texts_of_parts(field: str, parts: Sequence[ContentPart], media: MediaParts = NO_MEDIA) -> list[str]:
    """Return the text of each part, or its mark. Pictures and sounds are added to ``media``. Raises ValidationError."""
    return [_part(f"{field}[{number}]", part, media) for number, part in enumerate(parts)]


def _part(field: str, part: ContentPart, media: MediaParts) -> str:
    match part:
        case ContentPart(type="text", text=str(text)):
            return text
        case ContentPart(type="refusal", refusal=str(text)):
            return text
        case ContentPart(type="image_url") if not media.sees:
            return text_for(field, part.type)
        case ContentPart(type="input_audio") if not media.hears:
            return text_for(field, part.type)
        case ContentPart(type="image_url", image_url=ImageUrl(url=url)):
            return media.picture_at(f"{field}.image_url.url", url)
        case ContentPart(type="input_audio", input_audio=InputAudio(data=data)):
            return media.sound(f"{field}.input_audio.data", data)
        case ContentPart(type="text" | "refusal" | "image_url" | "input_audio"):
            raise missing_field_error(f"{field}.{part.type}")
        case _:
            return text_for(field, part.type)


def _call(field: str, number: int, call: ToolCall) -> Json:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        # Templates serialize the object themselves. Incomplete JSON that a model wrote stays text.
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments, type=dict[str, Any])
    check_depth(f"{field}.function.arguments", arguments)
    return {
        "id": str(number) if call.id is None else str(call.id),
        "type": "function",
        "function": {"name": call.function.name, "arguments": {} if arguments is None else arguments},
    }


def check_depth(field: str, value: Any, depth: int = MAX_DEPTH) -> None:
    """Require that recursive functions can walk ``value``. Raises ValidationError."""
    if isinstance(value, dict | list):
        if not depth:
            raise nested_error(field, MAX_DEPTH)
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(field, item, depth - 1)


def template_tools(tools: Sequence[Tool]) -> list[Json]:
    """Return the tools in OpenAI's form, which templates expect."""
    result = []
    for tool in tools:
        definition = tool.function
        parameters = definition.parameters if definition.parameters is not None else definition.arguments
        function: Json = {"name": definition.name, "description": definition.description or ""}
        function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
        result.append({"type": "function", "function": function})
    return result


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
        case NamedToolChoice(type="allowed_tools", allowed_tools=allowed):
            if allowed is None:
                raise missing_field_error("tool_choice.allowed_tools")
            named = [_called(tools, one.function.name) for one in allowed.tools]
            if allowed.mode == "required" and not named:
                raise ToolError("`tool_choice` demands a call, but there are no `tool_choice.allowed_tools.tools`")
            return ToolPlan(tools=tools, callable=named, required=allowed.mode == "required", several=several)
        case NamedToolChoice(function=function):
            if function is None:
                raise missing_field_error("tool_choice.function")
            return _named(tools, function.name)
        case name:
            return _named(tools, name)


def _named(tools: Sequence[Tool], name: str) -> ToolPlan:
    return ToolPlan(tools=tools, callable=[_called(tools, name)], required=True, several=False)


def _called(tools: Sequence[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise ToolError(f"Tool with name {name[:64]} not found")

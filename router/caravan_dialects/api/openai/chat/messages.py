"""Turns a client's messages and tools into what chat templates expect."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts, text_for
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.schema import ContentPart, ImageUrl, InputAudio, Message, Tool, ToolCall
from caravan_dialects.api.openai.rules import empty_messages_error, missing_field_error, nested_error

Json = dict[str, Any]

MAX_DEPTH = 64


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
    for name, value in (("audio", message.audio), ("function_call", message.function_call)):
        if value:
            raise unsupported_field_error(f"{field}.{name}", "set it to null", value)
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

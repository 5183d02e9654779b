"""Conversations with tools, for templates: as those that know tools expect them, and for those that do not, as text."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

Json = dict[str, Any]

_MISTRAL_ID_CHARACTERS = 9
DEFAULT_TOOL_PROMPT = (
    "To call a function, answer with nothing but a JSON object that has its name and its arguments: "
    '{"name": "...", "arguments": {...}}'
)


def with_short_ids(messages: Sequence[Json]) -> list[Json]:
    """Mistral's templates refuse ids that have not exactly nine letters and digits: others get a digest."""
    result = []
    for message in messages:
        if "tool_call_id" in message:
            message = message | {"tool_call_id": _short_id(message["tool_call_id"])}
        if "tool_calls" in message:
            message = message | {"tool_calls": [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]}
        result.append(message)
    return result


def _short_id(call_id: str) -> str:
    if len(call_id) == _MISTRAL_ID_CHARACTERS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_MISTRAL_ID_CHARACTERS]


def with_tools_as_text(messages: Sequence[Json], tools: Sequence[Json], tool_prompt: str) -> list[Json]:
    """For a template that knows no tools: described in the first message, calls and results as messages' text.

    The first, because what stands there is computed once for all turns of the conversation.
    """
    if not tools:
        return _calls_as_text(messages)
    listed = "\n".join(_dumped(tool["function"]) for tool in tools)
    return with_instruction(_calls_as_text(messages), f"You may call these functions:\n{listed}\n{tool_prompt}")


def with_instruction(messages: Sequence[Json], instruction: str) -> list[Json]:
    """Under the system's message, or over the first one: not all templates know a system."""
    if not messages:
        return []
    first, *others = messages
    if first["role"] == "system":
        content = f"{first['content']}\n\n{instruction}" if first["content"] else instruction
    else:
        content = f"{instruction}\n\n{first['content']}"
    return [first | {"content": content}, *others]


def _calls_as_text(messages: Sequence[Json]) -> list[Json]:
    result: list[Json] = []
    answers = False
    for message in messages:
        if message["role"] == "tool":
            text = f"Result of {message.get('name') or 'the function'}: {message['content']}"
            if answers:
                # Several at once are one turn: templates want turns that alternate.
                result[-1]["content"] += f"\n{text}"
            else:
                result.append({"role": "user", "content": text})
        else:
            calls = [_dumped(call["function"]) for call in message.get("tool_calls", ())]
            text = "\n".join(part for part in (message["content"], *calls) if part)
            result.append({"role": message["role"], "content": text})
        answers = message["role"] == "tool"
    return result


def _dumped(value: Any) -> str:
    return msgspec.json.encode(value).decode()

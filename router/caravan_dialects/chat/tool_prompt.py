"""Prepares conversations with tools for chat templates, also for templates that do not know tools."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from caravan_dialects.chat.call_text import json_text

Json = dict[str, Any]

_MISTRAL_ID_CHARACTERS = 9
# What a message without calls has beside its content.
_KEPT = ("role", "reasoning_content")
DEFAULT_TOOL_PROMPT = (
    "To call a function, answer with nothing but a JSON object that has its name and its arguments: "
    '{"name": "...", "arguments": {...}}'
)


def with_short_ids(messages: Sequence[Json]) -> list[Json]:
    """Replace call ids that Mistral's templates refuse, which are all but nine letters and digits, by digests."""
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
    """Write tools, calls and results as text of the messages, for a template that does not know tools.

    The first message describes the tools, so that all turns of the conversation share its KV cells.
    """
    if not tools:
        return _calls_as_text(messages)
    listed = "\n".join(json_text(tool["function"]) for tool in tools)
    return with_instruction(_calls_as_text(messages), f"You may call these functions:\n{listed}\n{tool_prompt}")


def with_instruction(messages: Sequence[Json], instruction: str) -> list[Json]:
    """Add ``instruction`` to the end of the system message, or if there is none, to the start of the first message.

    It gets no system message of its own, because not all templates know that role.
    """
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
                # Several results in a row become one turn, because templates want alternating turns.
                result[-1]["content"] += f"\n{text}"
            else:
                result.append({"role": "user", "content": text})
        else:
            calls = [_written_call(call["function"]) for call in message.get("tool_calls", ())]
            text = "\n".join(part for part in (message["content"], *calls) if part)
            result.append({key: message[key] for key in _KEPT if key in message} | {"content": text})
        answers = message["role"] == "tool"
    return result


def _written_call(function: Json) -> str:
    """Return a call with the white space of `json_layout`, so that the cache has the tokens that a model wrote."""
    return json.dumps(function, ensure_ascii=False)

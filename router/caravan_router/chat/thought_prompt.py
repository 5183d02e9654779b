"""Gives the thoughts of earlier replies to chat templates in the form that each reads."""

from collections.abc import Sequence
from typing import Any

from caravan_router.chat.thought_format import MISTRAL_THINK, thought_format_of

Json = dict[str, Any]


def with_thoughts(messages: Sequence[Json], template: str, *, continued: bool) -> list[Json]:
    """Return the messages with their ``reasoning_content`` in the form that the template reads.

    A template that reads none gets none. ``continued``: the output continues the last message.
    """
    last = len(messages) - 1
    return [
        _with_thought(message, template, text_only=continued and number == last)
        for number, message in enumerate(messages)
    ]


def _with_thought(message: Json, template: str, *, text_only: bool) -> Json:
    if "reasoning_content" not in message or "reasoning_content" in template:
        return message
    bare = {key: value for key, value in message.items() if key != "reasoning_content"}
    thought, content = message["reasoning_content"], message["content"]
    if thought_format_of(template) == MISTRAL_THINK:
        # Mistral's templates read a list of blocks.
        blocks = [{"type": "thinking", "thinking": thought}, *([{"type": "text", "text": content}] if content else [])]
        return bare if text_only else bare | {"content": blocks}
    if content and "tool_calls" in message:
        # The template of gpt-oss refuses a message that has a thought, a text and calls.
        return bare
    return bare | {"thinking": thought}

"""Brings thoughts into prompts: those of earlier replies, and the beginning or the end of the next one."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from caravan_dialects.chat.thought_format import (
    HARMONY,
    MISTRAL_THINK,
    Beginning,
    ThoughtFormat,
    beginning_after,
    thought_format_of,
)

Json = dict[str, Any]

# Variables of templates that switch thoughts on or off.
_SWITCH = re.compile(r"\benable_thinking\b|\bthinking is (not )?defined\b|\bif (not )?thinking\b")
# gpt-oss knows three efforts.
_HARMONY_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


class Thinking(Enum):
    """Whether a model is to think."""

    # The template decides.
    FREE = auto()
    ON = auto()
    OFF = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtPlan:
    """How a reply thinks. ``max_tokens``: the most tokens of its thought; None for no limit.

    ``options``: variables for the template. ``opened``: the prompt must open the thought that ``thinking`` asks for.
    """

    thought_format: ThoughtFormat
    thinking: Thinking = Thinking.FREE
    options: dict[str, bool | str] = field(default_factory=dict)
    max_tokens: int | None = None
    opened: bool = False

    def prompt_end(self, prompt: str, template: str) -> str:
        """Return what to write behind ``prompt``, as ``template`` rendered it, where it opens the assistant's turn."""
        known = self.thought_format
        is_open = beginning_after(known, prompt, None) is Beginning.THOUGHT
        is_closed = prompt.rstrip().endswith(known.closing)
        match self.thinking:
            case Thinking.OFF if is_open:
                return known.ending
            case Thinking.OFF if not is_closed and not _SWITCH.search(template):
                # The model would open a thought: it gets an empty one.
                return f"{known.opening}\n\n{known.ending}" if known is not HARMONY else known.opening + known.ending
            case Thinking.ON if self.opened and not is_open and not is_closed:
                return known.opening
            case _:
                return ""


def template_options(thinking: Thinking, effort: str | None, thought_format: ThoughtFormat) -> dict[str, bool | str]:
    """Return the variables with which templates switch thoughts on or off, or show an effort."""
    if thinking is Thinking.FREE:
        return {}
    switch = thinking is Thinking.ON
    options: dict[str, bool | str] = {"enable_thinking": switch, "thinking": switch}
    if effort is not None and switch:
        options["reasoning_effort"] = _HARMONY_EFFORTS.get(effort, effort) if thought_format is HARMONY else effort
    return options


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
    if thought_format_of(template) is MISTRAL_THINK:
        # Mistral's templates read a list of blocks.
        blocks = [{"type": "thinking", "thinking": thought}, *([{"type": "text", "text": content}] if content else [])]
        return bare if text_only else bare | {"content": blocks}
    if content and "tool_calls" in message:
        # The template of gpt-oss refuses a message that has a thought, a text and calls.
        return bare
    return bare | {"thinking": thought}

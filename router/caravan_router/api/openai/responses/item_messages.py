"""Turns items into the messages that chat templates expect."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from caravan_router.api.generation.parts import MediaParts
from caravan_router.api.openai.chat.schema import FunctionCall, Message, ToolCall
from caravan_router.api.openai.responses.items import HOSTED
from caravan_router.api.openai.responses.parts import shown_part
from caravan_router.api.openai.responses.tools import custom_arguments
from caravan_router.conversations.nodes import Json


@dataclass(frozen=True, slots=True)
class ItemTexts:
    """Makes texts of the contents of items, with marks of ``media``.

    ``fields``: what a request calls the items that it has, by their ids. Earlier ones are called by their ids.
    """

    media: MediaParts
    fields: Mapping[str, str] = field(default_factory=dict)

    def of(self, item: Json, key: str = "content") -> str:
        """Return the text of ``item``'s content, or its output. Raises ValidationError."""
        content = item[key]
        if isinstance(content, str):
            return content
        name = f"{self.fields.get(item['id'], item['id'])}.{key}"
        of_tool = key != "content"
        parts = enumerate(content)
        return self.media.joined(
            shown_part(f"{name}[{number}]", part, self.media, of_tool=of_tool) for number, part in parts
        )


def messages_of(instructions: str | None, items: Sequence[Json], texts: ItemTexts) -> list[Message]:
    """Return the messages of ``items``; ``instructions`` and system messages at the start become one message.

    Many templates know a system message at the start only. Thoughts, a text and calls that follow each other are one
    turn of the assistant. Raises ValidationError.
    """
    system = [] if instructions is None else [instructions]
    start = next((at for at, item in enumerate(items) if not _is_system(item)), len(items))
    system += [texts.of(item) for item in items[:start]]
    messages = [Message(role="system", content="\n\n".join(system))] if system else []
    turn = _AssistantTurn()
    for item in items[start:]:
        match item["type"]:
            case "reasoning":
                turn.begin_thoughts(messages)
                turn.thoughts += [part["text"] for part in item["content"]]
            case "message" if item["role"] == "assistant":
                turn.begin_text(messages)
                turn.texts.append(texts.of(item))
            case "function_call":
                turn.calls.append(_call(item, item["arguments"]))
            case "custom_tool_call":
                turn.calls.append(_call(item, custom_arguments(item["input"])))
            case "message":
                turn.end(messages)
                messages.append(Message(role=item["role"], content=texts.of(item)))
            case "function_call_output" | "custom_tool_call_output":
                turn.end(messages)
                output = texts.of(item, "output")
                messages.append(Message(role="tool", content=output, tool_call_id=item["call_id"]))
            case kind:
                assert kind in HOSTED, kind
    turn.end(messages)
    return messages


def turns_of(items: Sequence[Json]) -> list[int]:
    """Return where turns begin. Each begins with the first of the user's messages in a row; others precede them."""
    starts = []
    before = ""
    for at, item in enumerate(items):
        role = item["role"] if item["type"] == "message" else item["type"]
        if role == "user" and before != "user":
            starts.append(at)
        before = role
    return starts


def calls_of(items: Sequence[Json]) -> Iterator[tuple[int, int]]:
    """Yield the places of each call and of its output."""
    calls: dict[str, int] = {}
    for at, item in enumerate(items):
        if item["type"] in {"function_call", "custom_tool_call"}:
            calls[item["call_id"]] = at
        elif item["type"] in {"function_call_output", "custom_tool_call_output"} and item["call_id"] in calls:
            yield calls[item["call_id"]], at


def count_system(items: Sequence[Json]) -> int:
    """Return the number of system messages at the start."""
    return next((at for at, item in enumerate(items) if not _is_system(item)), len(items))


def _is_system(item: Json) -> bool:
    return item["type"] == "message" and item["role"] in {"system", "developer"}


def _call(item: Json, arguments: str) -> ToolCall:
    return ToolCall(id=item["call_id"], function=FunctionCall(name=item["name"], arguments=arguments))


class _AssistantTurn:
    """The assistant's turn that is being read."""

    def __init__(self) -> None:
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []

    def begin_thoughts(self, messages: list[Message]) -> None:
        if self.texts or self.calls:
            self.end(messages)

    def begin_text(self, messages: list[Message]) -> None:
        if self.calls:
            self.end(messages)

    def end(self, messages: list[Message]) -> None:
        """Add the message of the turn, if there is one."""
        if self.thoughts or self.texts or self.calls:
            messages.append(
                Message(
                    role="assistant",
                    content="".join(self.texts),
                    reasoning_content="".join(self.thoughts) or None,
                    tool_calls=self.calls or None,
                )
            )
        self.thoughts, self.texts, self.calls = [], [], []

"""Turns items into the messages that chat templates expect."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.openai.chat.schema import FunctionCall, Message, ToolCall
from caravan_dialects.api.openai.responses.items import shown_part
from caravan_dialects.api.openai.responses.other_items import plain_items
from caravan_dialects.api.openai.responses.tools import OfferedTools, ToolName, custom_arguments
from caravan_dialects.conversations.nodes import Json


@dataclass(frozen=True, slots=True)
class ItemTexts:
    """Makes texts of the contents of items, with marks of ``media``, and names of calls, with the tools ``offered``.

    ``fields``: what a request calls the items that it has, by their ids. Earlier ones are called by their ids.
    """

    media: MediaParts
    offered: OfferedTools
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

    def call(self, item: Json, arguments: str) -> ToolCall:
        """Return a call by the name that the model knows."""
        name = self.offered.model_name(ToolName(item["name"], item.get("namespace")))
        return ToolCall(id=item["call_id"], function=FunctionCall(name=name, arguments=arguments))


def messages_of(instructions: str | None, items: Sequence[Json], texts: ItemTexts) -> list[Message]:
    """Return the messages of ``items``; ``instructions`` and system messages at the start become one message.

    Many templates know a system message at the start only. Thoughts, a text and calls that follow each other are one
    turn of the assistant. Raises ValidationError.
    """
    system = [] if instructions is None else [instructions]
    start = count_system(items)
    system += [texts.of(item) for item in items[:start] if _is_system(item)]
    messages = [Message(role="system", content="\n\n".join(system))] if system else []
    turn = _AssistantTurn()
    for _, item in _plain(items[start:]):
        match item["type"]:
            case "reasoning":
                turn.begin_thoughts(messages)
                turn.thoughts += [part["text"] for part in item["content"]]
            case "message" if item["role"] == "assistant":
                turn.begin_text(messages)
                turn.texts.append(texts.of(item))
            case "function_call":
                turn.calls.append(texts.call(item, item["arguments"]))
            case "custom_tool_call":
                turn.calls.append(texts.call(item, custom_arguments(item["input"])))
            case "message":
                turn.end(messages)
                messages.append(Message(role=item["role"], content=texts.of(item)))
            case "function_call_output" | "custom_tool_call_output":
                turn.end(messages)
                output = texts.of(item, "output")
                messages.append(Message(role="tool", content=output, tool_call_id=item["call_id"]))
            case kind:
                raise AssertionError(kind)
    turn.end(messages)
    return messages


def turns_of(items: Sequence[Json]) -> list[int]:
    """Return where turns begin. Each begins with the first of the user's messages in a row; others precede them."""
    starts = []
    before = ""
    for at, item in _plain(items):
        role = item["role"] if item["type"] == "message" else item["type"]
        if role == "user" and before != "user":
            starts.append(at)
        before = role
    return starts


def calls_of(items: Sequence[Json]) -> Iterator[tuple[int, int]]:
    """Yield the places of each call and of its output."""
    calls: dict[str, int] = {}
    for at, item in _plain(items):
        if item["type"] in {"function_call", "custom_tool_call"}:
            calls[item["call_id"]] = at
        elif item["type"] in {"function_call_output", "custom_tool_call_output"} and item["call_id"] in calls:
            yield calls[item["call_id"]], at


def count_system(items: Sequence[Json]) -> int:
    """Return the number of system messages at the start, with what the model is not shown between them."""
    count = 0
    for at, item in enumerate(items):
        if _is_system(item):
            count = at + 1
        elif plain_items(item):
            break
    return count


def _plain(items: Sequence[Json]) -> Iterator[tuple[int, Json]]:
    """Yield what the model is shown of each item, with the item's place."""
    for at, item in enumerate(items):
        for one in plain_items(item):
            yield at, one


def _is_system(item: Json) -> bool:
    return item["type"] == "message" and item["role"] in {"system", "developer"}


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

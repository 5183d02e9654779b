"""Outputs of chats that are collected, until they are sent whole."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from caravan_dialects.api.openai.chat.output import ChatOutput, Part, read_outputs
from caravan_dialects.api.openai.chat.schema import CalledFunction, ReplyMessage, ReplyToolCall
from caravan_dialects.api.openai.events import new_call_id
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart
from caravan_dialects.text.assembler import Piece


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``arguments``: JSON, unless the output was cut off."""

    name: str
    arguments: str

    @property
    def text(self) -> str:
        """What a reply shows of a call that was cut off, if its dialect has objects only."""
        return f'{{"name": "{self.name}", "arguments": {self.arguments}'


class Collected:
    """Collects thoughts and text until they are taken, and all calls."""

    __slots__ = ("_arguments", "_names", "_text", "_thoughts")

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._text: list[str] = []
        # Of each call, and the fragments of the arguments of each.
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    @property
    def calls(self) -> list[Call]:
        """All calls so far."""
        return [Call(name, "".join(fragments)) for name, fragments in zip(self._names, self._arguments, strict=True)]

    def add(self, parts: Iterable[Part]) -> None:
        """Add the next parts of the output."""
        for part in parts:
            match part:
                case ThoughtPart():
                    self._thoughts.append(part.text)
                case TextPart():
                    self._text.append(part.text)
                case CallPart():
                    if part.name is not None:
                        self._names.append(part.name)
                        self._arguments.append([])
                    self._arguments[part.index].append(part.arguments)
                case _:
                    assert_never(part)

    def take(self) -> tuple[str, str]:
        """Return the thoughts and the text since the last call."""
        taken = "".join(self._thoughts), "".join(self._text)
        self._thoughts.clear()
        self._text.clear()
        return taken


@dataclass(slots=True)
class WholeOutput:
    """The output of a choice that is sent in one piece."""

    output: ChatOutput
    pieces: list[Piece] = field(default_factory=list)
    collected: Collected = field(default_factory=Collected)

    @property
    def finish(self) -> str:
        """OpenAI's finish reason of an output that has ended."""
        assert self.output.finish is not None
        return self.output.finish

    def take(self, pieces: Sequence[Piece], parts: Sequence[Part]) -> None:
        """Add the next pieces, and the parts that they complete."""
        self.pieces.extend(pieces)
        self.collected.add(parts)

    def message(self) -> ReplyMessage:
        """Return the message of an output that has ended. Call it once."""
        thought, text = self.collected.take()
        message = ReplyMessage("assistant", text)
        if thought:
            message.reasoning_content = message.reasoning = thought
        if calls := self.collected.calls:
            message.content = text or None
            message.tool_calls = [
                ReplyToolCall(new_call_id(), "function", CalledFunction(call.name, call.arguments)) for call in calls
            ]
        return message


async def read_whole(outputs: Sequence[ChatOutput]) -> list[WholeOutput]:
    """Read every output to its end. Raises EngineError."""
    wholes = [WholeOutput(output) for output in outputs]
    await read_outputs(outputs, [whole.take for whole in wholes])
    return wholes

"""Makes the messages of a chat of Anthropic's turns, and the texts of their blocks."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import msgspec

from caravan_dialects.api.anthropic.schema import Block, MessageParam, PromptFields, Source
from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts, text_for
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.schema import FunctionCall, Message, ToolCall
from caravan_dialects.api.openai.rules import missing_field_error

# Of results of tools that Anthropic runs: what only Anthropic can read.
_SEALED = "encrypted_"
# Claude Code begins the system prompt with this line, whose value changes with each request: it would keep the prompt
# from being found in the cache.
_BILLING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
# Between messages that become one turn, and between thoughts.
_BREAK = "\n\n"
# What stands before the result of a tool that has failed.
_ERROR = "Error: "
TOOL_CHANGES = frozenset({"tool_addition", "tool_removal"})
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
# A field's name and its block.
_Named = tuple[str, Block]


def joined_lines(texts: Iterable[str | None]) -> str:
    """Return those of ``texts`` that are not empty, a line break between two of them."""
    return "\n".join(text for text in texts if text)


def shown_block(field: str, block: Block, media: MediaParts, *, of_tool: bool = False) -> str:
    """Return the text of a block, or the mark of its picture. ``of_tool``: see `text_for`. Raises ValidationError."""
    if block.type != "image" or not media.sees:
        return text_of_block(field, block, of_tool=of_tool)
    source = block.source
    if not isinstance(source, Source) or source.type is None:
        raise missing_field_error(f"{field}.source.type")
    if source.type != "base64":
        neutral = 'set it to "base64": nothing is fetched'
        raise unsupported_field_error(f"{field}.source.type", neutral, source.type)
    if source.data is None:
        raise missing_field_error(f"{field}.source.data")
    return media.picture(f"{field}.source.data", source.data)


def text_of_block(field: str, block: Block, *, of_tool: bool = False) -> str:
    """Return the text of a block. ``of_tool``: see `text_for`. Raises ValidationError."""
    match block:
        case Block(type="text", text=str(text)):
            return text
        case Block(type="text"):
            raise missing_field_error(f"{field}.text")
        case Block(type="document", source=Source(type="text", data=str(text))):
            return joined_lines((block.title, block.context, text))
        case Block(type="document", source=Source(type="content", content=content)) if content is not None:
            text = _content_text(f"{field}.source.content", content, of_tool=of_tool)
            return joined_lines((block.title, block.context, text))
        case Block(type="search_result", source=source, content=content):
            text = _content_text(f"{field}.content", content, of_tool=of_tool)
            return joined_lines((block.title, source if isinstance(source, str) else None, text))
        case Block(type="web_search_result"):
            return joined_lines((block.title, block.url))
        case Block(type="tool_reference", tool_name=str(name)):
            return name
        case Block(type="tool_reference"):
            raise missing_field_error(f"{field}.tool_name")
        case _:
            return text_for(field, block.type, of_tool=of_tool)


def result_text(field: str, block: Block, media: MediaParts = NO_MEDIA) -> str:
    """Return what a tool has answered, with marks of pictures. Raises ValidationError."""
    content = block.content
    if isinstance(content, list):
        named = ((f"{field}.content[{number}]", inner) for number, inner in enumerate(content))
        return media.joined(shown_block(name, inner, media, of_tool=True) for name, inner in named)
    return _content_text(f"{field}.content", content, of_tool=True)


def _content_text(field: str, content: str | list[Block] | dict[str, Any] | None, *, of_tool: bool) -> str:
    match content:
        case None:
            return ""
        case str(text):
            return text
        case dict(result):
            # Such as what a program has printed, of a tool that Anthropic has run.
            return msgspec.json.encode({k: v for k, v in result.items() if not k.startswith(_SEALED)}).decode()
        case blocks:
            named = enumerate(blocks)
            return joined_lines(text_of_block(f"{field}[{at}]", block, of_tool=of_tool) for at, block in named)


def chat_messages_of(body: PromptFields, media: MediaParts) -> list[Message]:
    """Return the messages of a chat. Pictures are added to ``media``. Raises ValidationError."""
    messages: list[Message] = []
    if system := system_text(body):
        messages.append(Message(role="system", content=system))
    # Messages in a row that are not the assistant's are one turn of the user: templates want alternating turns.
    for role, said in groupby(_since_compaction(body.messages), itemgetter(0)):
        turn = [blocks for _, blocks in said]
        messages += _assistant(turn) if role == "assistant" else _user(turn, media)
    return messages


def blocks_of(messages: Sequence[MessageParam]) -> Iterator[_Named]:
    """Yield all blocks of ``messages`` with their fields' names."""
    for number, message in enumerate(messages):
        yield from _blocks(f"messages[{number}].content", message.content)


def system_text(body: PromptFields) -> str:
    """Return the system prompt as the model reads it. Raises ValidationError."""
    if isinstance(body.system, str):
        texts = [body.system]
    else:
        texts = [text_of_block(f"system[{number}]", block) for number, block in enumerate(body.system or ())]
    return joined_lines(_BILLING_LINE.sub("", text) for text in texts)


def _since_compaction(messages: Sequence[MessageParam]) -> list[tuple[str, list[_Named]]]:
    """Return the role and the blocks of each message from the last compaction on.

    Its summary, which stands for all messages before, becomes a message of the user.
    """
    kept: list[tuple[str, list[_Named]]] = []
    for number, message in enumerate(messages):
        role = "assistant" if message.role == "assistant" else "user"
        blocks: list[_Named] = []
        for name, block in _blocks(f"messages[{number}].content", message.content):
            if block.type in TOOL_CHANGES:
                continue
            if block.type != "compaction":
                blocks.append((name, block))
            # A compaction that has failed has no content.
            elif isinstance(block.content, str) and block.content:
                kept = [("user", [(name, Block(type="text", text=block.content))])]
                blocks = []
        if blocks or not message.content:
            kept.append((role, blocks))
    return kept


def _blocks(name: str, content: str | list[Block]) -> list[_Named]:
    if isinstance(content, str):
        return [(name, Block(type="text", text=content))]
    return [(f"{name}[{number}]", block) for number, block in enumerate(content)]


@dataclass(slots=True)
class _Said:
    """What the assistant has said since the last result of a tool."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            role="assistant",
            # The text of a last message is continued: nothing may be added to its end.
            content=NO_MEDIA.joined(self.texts),
            reasoning_content=_BREAK.join(text for text in self.thoughts if text) or None,
            tool_calls=self.calls or None,
        )


def _assistant(turn: Sequence[Sequence[_Named]]) -> list[Message]:
    """Return the messages of an assistant's turn: one, but for results of tools that Anthropic has run."""
    messages: list[Message] = []
    said = _Said()
    blocks = chain.from_iterable(turn)
    for name, block in blocks:
        if block.type == "thinking":
            said.thoughts.append(block.thinking or "")
        elif block.type in _CALLS:
            if not block.name:
                raise missing_field_error(f"{name}.name")
            said.calls.append(
                ToolCall(function=FunctionCall(name=block.name, arguments=block.input or {}), id=block.id)
            )
        elif block.type.endswith("_tool_result"):
            messages += [said.message(), _result(block, result_text(name, block))]
            said = _Said()
        elif block.type != "redacted_thinking":
            said.texts.append(text_of_block(name, block))
    return messages if messages and said == _Said() else [*messages, said.message()]


def _user(turn: Sequence[Sequence[_Named]], media: MediaParts) -> list[Message]:
    """Return the results of tools, which follow the calls, and the message of a user's turn."""
    results: list[Message] = []
    texts: list[str] = []
    for blocks in turn:
        parts = []
        for name, block in blocks:
            if block.type == "tool_result":
                results.append(_result(block, result_text(name, block, media)))
            else:
                parts.append(shown_block(name, block, media))
        if text := media.joined(parts):
            texts.append(text)
    return results if results and not texts else [*results, Message(role="user", content=_BREAK.join(texts))]


def _result(block: Block, text: str) -> Message:
    content = f"{_ERROR}{text}" if block.is_error else text
    return Message(role="tool", content=content, tool_call_id=block.tool_use_id)

"""The content blocks of a reply, made from the parts of an output as they come."""

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, assert_never

import msgspec

from caravan_dialects.api.anthropic.schema import (
    BlockDelta,
    BlockEvent,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    ReplyBlock,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from caravan_dialects.api.openai.chat.output import Part
from caravan_dialects.api.openai.chat.whole import Call
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart

_SIGNATURE_BYTES = 16


class Blocks:
    """Collects blocks. A block ends where a part of another kind, or of another call, begins."""

    __slots__ = ("_fragments", "_index", "_open", "blocks")

    def __init__(self) -> None:
        # All blocks that have ended, with a text in place of a call that was cut off.
        self.blocks: list[ReplyBlock] = []
        # The last block, while it has not ended, with its index and the fragments of its content.
        self._index = -1
        self._open: ReplyBlock | None = None
        self._fragments: list[str] = []

    def add(self, parts: Iterable[Part]) -> Iterator[BlockEvent]:
        """Add parts and yield their events."""
        for part in parts:
            match part:
                case ThoughtPart(text=text):
                    if not isinstance(self._open, ThinkingBlock):
                        yield from self._begin(ThinkingBlock("", ""))
                        # A later thought begins with a blank line, which blocks do not need.
                        text = text.lstrip("\n")
                    yield self._delta(text, ThinkingDelta(text))
                case TextPart(text=text):
                    if not isinstance(self._open, TextBlock):
                        yield from self._begin(TextBlock(""))
                        text = text.lstrip("\n") if self._index else text
                    yield self._delta(text, TextDelta(text))
                case CallPart(name=name, arguments=arguments):
                    if name is not None:
                        yield from self._begin(ToolUseBlock(f"toolu_{secrets.token_hex(12)}", name, {}))
                    if arguments:
                        yield self._delta(arguments, InputJsonDelta(arguments))
                case _:
                    assert_never(part)

    def end(self) -> Iterator[BlockEvent]:
        """End the open block, if there is one, and yield its events."""
        block, self._open = self._open, None
        if block is None:
            return
        content = "".join(self._fragments)
        self._fragments.clear()
        match block:
            case ThinkingBlock():
                block.thinking = content
                block.signature = hashlib.blake2b(content.encode(), digest_size=_SIGNATURE_BYTES).hexdigest()
                yield ContentBlockDelta(self._index, SignatureDelta(block.signature))
                self.blocks.append(block)
            case TextBlock():
                block.text = content
                self.blocks.append(block)
            case ToolUseBlock():
                # A call that was cut off is no object: a whole reply shows it as text.
                if (arguments := _object_of(content)) is None:
                    self.blocks.append(TextBlock(Call(block.name, content).text))
                else:
                    block.input = arguments
                    self.blocks.append(block)
            case _:
                assert_never(block)
        yield ContentBlockStop(self._index)

    def _begin(self, block: ReplyBlock) -> Iterator[BlockEvent]:
        yield from self.end()
        self._index += 1
        self._open = block
        yield ContentBlockStart(self._index, block)

    def _delta(self, text: str, delta: BlockDelta) -> BlockEvent:
        self._fragments.append(text)
        return ContentBlockDelta(self._index, delta)


def _object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that ``text`` is; None if it is none."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None

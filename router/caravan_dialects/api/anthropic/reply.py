"""Replies of ``/v1/messages``, whole and streamed."""

import hashlib
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import assert_never

import msgspec

from caravan_dialects.api.anthropic.diagnostics import diagnosed
from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.anthropic.schema import (
    AnthropicMessage,
    AppliedEdits,
    BlockDelta,
    BlockEvent,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Diagnostics,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    ReplyBlock,
    SignatureDelta,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from caravan_dialects.api.anthropic.translation import skipped_tools, source_of
from caravan_dialects.api.body import object_of
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.comparison import RememberedRequests
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.generation.serving import used_tier
from caravan_dialects.api.openai.chat.output import Call, ChatOutput, Part, read_outputs
from caravan_dialects.api.openai.chat.validation import ValidChat, validate_whole_chat
from caravan_dialects.api.stream import NAMED_EVENTS, Events, named
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart
from caravan_dialects.text.assembler import Piece
from caravan_scheduler.core.generation import BULK_PRIORITY

_SIGNATURE_BYTES = 16
_ENCODER = msgspec.json.Encoder()


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
                if (arguments := object_of(content)) is None:
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


def _named(event: Event) -> bytes:
    """Return the message of an event, whose name is its type."""
    return named(str(event.__struct_config__.tag), _ENCODER.encode(event))


_PING = _named(Ping())
_EVENTS = replace(NAMED_EVENTS, keep_alive=NAMED_EVENTS.frame(_PING))


class AskedMessage(Asked):
    """The assistant's next message."""

    dialect = ANTHROPIC
    framing = _EVENTS
    operation = "chat"

    def __init__(self, body: MessagesRequest, request_id: str, remembered: RememberedRequests) -> None:
        """``remembered``: requests that this one may be compared with."""
        self._body = body
        self._request_id = request_id
        self._remembered = remembered
        self.model = body.model
        self.streamed = bool(body.stream)

    async def validate(self, context: Context) -> "MessageAnswer":
        chat = await validate_whole_chat(context, source_of(self._body, context.model))
        answer = MessageAnswer(chat, msgspec.UNSET if self._body.context_management is None else AppliedEdits())
        answer.diagnostics = diagnosed(self._remembered, context, self._body, answer.id, chat.request.prompt)
        return answer

    @property
    def skipped_tools(self) -> frozenset[str]:
        """Types of tools that the model is not offered, since Anthropic runs them."""
        return skipped_tools(self._body)

    def error_messages(self, error: Exception) -> Sequence[bytes]:
        return (named("error", self.dialect.body(error, self._request_id)),)


class MessageAnswer(Answer):
    """The message, as blocks of text, thoughts and calls."""

    def __init__(self, chat: ValidChat, edits: AppliedEdits | msgspec.UnsetType) -> None:
        """``edits``: what the reply tells of edits of the context."""
        super().__init__((chat.request,))
        self._chat = chat
        self._edits = edits
        self.id = f"msg_{secrets.token_hex(12)}"
        priority = chat.request.specs[0].priority
        used = "batch" if priority <= BULK_PRIORITY else used_tier(priority)
        # Anthropic has no cheaper tier beside that of batches.
        self._tier = used if used in {"batch", "priority"} else "standard"
        self.diagnostics: Diagnostics | msgspec.UnsetType | None = msgspec.UNSET

    async def whole(self, runs: Sequence[Run]) -> bytes:
        [run] = runs
        output, blocks = self._chat.output(run), Blocks()

        def take(_pieces: Sequence[Piece], parts: Sequence[Part]) -> None:
            # A whole reply has no use for the events.
            deque(blocks.add(parts), maxlen=0)

        await read_outputs([output], [take])
        deque(blocks.end(), maxlen=0)
        message = self._message(self._usage(output))
        message.content = blocks.blocks
        message.context_management = self._edits
        stop = _stop_of(output, blocks)
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        return _ENCODER.encode(message)

    async def send(self, events: Events, index: int, run: Run) -> None:
        output, blocks = self._chat.output(run), Blocks()
        usage = MessageUsage(
            input_tokens=len(self._chat.request.prompt),
            cache_creation_input_tokens=0,
            cache_read_input_tokens=0,
            output_tokens=0,
            service_tier=self._tier,
        )
        await events.send(_named(MessageStart(self._message(usage))), _PING)
        async for ready in run:
            messages: list[bytes] = []
            for pieces in ready:
                # Each event is encoded before the block that it shows changes.
                messages += map(_named, blocks.add(output.push(pieces)))
                if output.finish is not None:
                    messages += map(_named, blocks.end())
            await events.send(*messages)
        last = MessageDelta(_stop_of(output, blocks), self._usage(output), self._edits)
        await events.send(_named(last), _named(MessageStop()))

    def _message(self, usage: MessageUsage) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.id, model=self._chat.model, content=[], usage=usage, diagnostics=self.diagnostics
        )

    def _usage(self, output: ChatOutput) -> MessageUsage:
        cached = output.run.cached_tokens
        return MessageUsage(
            input_tokens=len(self._chat.request.prompt) - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=output.run.tokens,
            output_tokens_details=OutputTokensDetails(output.thought_tokens) if self._chat.thinks else msgspec.UNSET,
            service_tier=self._tier,
        )


def _stop_of(output: ChatOutput, blocks: Blocks) -> StopDelta:
    if output.finish == "length":
        return StopDelta("max_tokens", None)
    if any(isinstance(block, ToolUseBlock) for block in blocks.blocks):
        return StopDelta("tool_use", None)
    return StopDelta("end_turn" if output.stop is None else "stop_sequence", output.stop)

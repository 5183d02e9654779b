"""Replies of ``/v1/messages``, whole and streamed."""

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from caravan_dialects.api.anthropic.blocks import Blocks
from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.anthropic.schema import (
    AnthropicMessage,
    AppliedEdits,
    Event,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    StopDelta,
    ToolUseBlock,
)
from caravan_dialects.api.anthropic.translation import skipped_tools, source_of
from caravan_dialects.api.generation.answer import Answer
from caravan_dialects.api.generation.asked import Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.chat.output import ChatOutput, Part, read_outputs
from caravan_dialects.api.openai.chat.validation import ValidChat, validate_whole_chat
from caravan_dialects.api.stream import NAMED_EVENTS, Events, named
from caravan_dialects.text.assembler import Piece

_ENCODER = msgspec.json.Encoder()


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

    def __init__(self, body: MessagesRequest, request_id: str) -> None:
        self._body = body
        self._request_id = request_id
        self.model = body.model
        self.streamed = bool(body.stream)

    async def validate(self, context: Context) -> "MessageAnswer":
        chat = await validate_whole_chat(context, source_of(self._body, context.model))
        return MessageAnswer(chat, msgspec.UNSET if self._body.context_management is None else AppliedEdits())

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
        self._id = f"msg_{secrets.token_hex(12)}"

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
        return AnthropicMessage(id=self._id, model=self._chat.model, content=[], usage=usage)

    def _usage(self, output: ChatOutput) -> MessageUsage:
        cached = output.run.cached_tokens
        return MessageUsage(
            input_tokens=len(self._chat.request.prompt) - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=output.run.tokens,
            output_tokens_details=OutputTokensDetails(output.thought_tokens) if self._chat.thinks else msgspec.UNSET,
        )


def _stop_of(output: ChatOutput, blocks: Blocks) -> StopDelta:
    if output.finish == "length":
        return StopDelta("max_tokens", None)
    if any(isinstance(block, ToolUseBlock) for block in blocks.blocks):
        return StopDelta("tool_use", None)
    return StopDelta("end_turn" if output.stop is None else "stop_sequence", output.stop)

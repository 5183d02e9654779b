"""Replies of ``/v1/messages``, whole and streamed."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from caravan_router.http.anthropic.blocks import Blocks
from caravan_router.http.anthropic.errors import ANTHROPIC
from caravan_router.http.anthropic.schema import (
    AnthropicMessage,
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
from caravan_router.http.anthropic.translation import source_of
from caravan_router.http.generation.answer import Reply
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run, read_all
from caravan_router.http.openai.chat.output import ChatOutput
from caravan_router.http.openai.chat.validation import ValidChat, validate_chat
from caravan_router.http.server.event_stream import NAMED_EVENTS, EventStream, named
from caravan_router.text.assembler import Piece

_ENCODER = msgspec.json.Encoder()


def _named(event: Event) -> bytes:
    """Return the message of an event, whose name is its type."""
    return named(str(event.__struct_config__.tag), _ENCODER.encode(event))


_PING = _named(Ping())
_EVENTS = replace(NAMED_EVENTS, keep_alive=NAMED_EVENTS.frame(_PING))


class MessagesReply(Reply):
    """The assistant's next message."""

    dialect = ANTHROPIC
    framing = _EVENTS
    operation = "chat"
    _chat: ValidChat

    def __init__(self, body: MessagesRequest, request_id: str) -> None:
        self._body = body
        self._request_id = request_id
        self.model = body.model
        self.streamed = bool(body.stream)
        self._id = f"msg_{secrets.token_hex(12)}"

    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        self._chat = await validate_chat(context, source_of(self._body, context.model), 1)
        return (self._chat.request,)

    async def whole(self, runs: Sequence[Run]) -> bytes:
        [run] = runs
        output, blocks = self._chat.output(), Blocks()

        def take(pieces: Sequence[Piece]) -> None:
            _read(run, output, blocks, pieces)

        await read_all(runs, [take])
        if output.finish is None:
            # The deadline passed between two pieces.
            _read(run, output, blocks, ())
        message = self._message(self._usage(run, output))
        message.content = blocks.blocks
        stop = _stop_of(output, blocks)
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        return _ENCODER.encode(message)

    async def send(self, events: EventStream, index: int, run: Run) -> None:
        output, blocks = self._chat.output(), Blocks()
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
                messages += map(_named, blocks.add(output.push(pieces, run.finish)))
                if not output.wanted:
                    run.end()
                if output.finish is not None:
                    messages += map(_named, blocks.end())
            await events.send(*messages)
        last = MessageDelta(_stop_of(output, blocks), self._usage(run, output))
        await events.send(_named(last), _named(MessageStop()))

    def error_messages(self, error: Exception) -> Sequence[bytes]:
        return (named("error", self.dialect.body(error, self._request_id)),)

    def _message(self, usage: MessageUsage) -> AnthropicMessage:
        return AnthropicMessage(id=self._id, model=self._chat.model, content=[], usage=usage)

    def _usage(self, run: Run, output: ChatOutput) -> MessageUsage:
        cached = run.cached_tokens
        return MessageUsage(
            input_tokens=len(self._chat.request.prompt) - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=run.tokens,
            output_tokens_details=OutputTokensDetails(output.thought_tokens) if self._chat.thinks else msgspec.UNSET,
        )


def _read(run: Run, output: ChatOutput, blocks: Blocks, pieces: Sequence[Piece]) -> None:
    """Read pieces for a reply that is sent whole, which needs no events."""
    for _ in blocks.add(output.push(pieces, run.finish)):
        pass
    if output.finish is not None:
        for _ in blocks.end():
            pass
    if not output.wanted:
        run.end()


def _stop_of(output: ChatOutput, blocks: Blocks) -> StopDelta:
    if output.finish == "length":
        return StopDelta("max_tokens", None)
    if any(isinstance(block, ToolUseBlock) for block in blocks.blocks):
        return StopDelta("tool_use", None)
    return StopDelta("end_turn" if output.stop is None else "stop_sequence", output.stop)

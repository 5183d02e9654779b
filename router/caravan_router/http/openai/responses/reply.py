"""Replies of ``/v1/responses``, whole and streamed."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from caravan_router.conversations.ids import new_id
from caravan_router.conversations.nodes import ExactTokens, Node
from caravan_router.http.generation.answer import Reply
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run
from caravan_router.http.openai.chat.output import ChatOutput
from caravan_router.http.openai.chat.validation import ValidChat
from caravan_router.http.openai.errors import OPENAI, openai_code
from caravan_router.http.openai.responses.output import OutputItems
from caravan_router.http.openai.responses.running import RunningResponse
from caravan_router.http.openai.responses.schema import (
    ConversationName,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Reasoning,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)
from caravan_router.http.openai.responses.tools import offered_tools
from caravan_router.http.openai.responses.turn import Turn
from caravan_router.http.openai.responses.validation import validate_turn
from caravan_router.http.server.errors import ContextLengthError, kind_of, message_of
from caravan_router.http.server.event_stream import NAMED_EVENTS, EventStream, named
from caravan_router.text.assembler import Piece

_ENCODER = msgspec.json.Encoder()


class ResponseReply(Reply):
    """Answers one turn with messages, thoughts and calls, and stores it."""

    dialect = OPENAI
    framing = NAMED_EVENTS
    operation = "chat"
    # Agents look for this error in a stream.
    errors_as_events = (ContextLengthError,)
    _chat: ValidChat
    _output: ChatOutput
    _run: Run

    def __init__(self, body: ResponseRequest, turn: Turn) -> None:
        """Raises ValidationError."""
        self._body = body
        self._turn = turn
        self._offered = offered_tools(body.tools or ())
        self._items = OutputItems(self._emit, self._offered.custom)
        self._token_ids: list[int] = []
        # Messages that are not sent yet, and the number of all messages so far.
        self._unsent: list[bytes] = []
        self._sequence_number = 0
        self._response = _response_of(body, turn)
        self._fingerprint = ""
        self.model = body.model
        self.streamed = bool(body.stream)
        conversation = "" if turn.head is None else turn.head.id
        self.running = RunningResponse(id=self._response.id, owner=turn.owner, conversation=conversation, progress=self)

    @property
    def skipped_tools(self) -> frozenset[str]:
        """Types of tools that the model is not offered."""
        return self._offered.skipped

    def response(self) -> ResponseObject:
        return msgspec.structs.replace(self._response, output=self._items.items)

    def node(self) -> Node:
        items = (*self._turn.items, *self._items.items)
        tokens = (*self._chat.request.prompt, *self._token_ids)
        return Node(
            id=self._response.id,
            parent=self._turn.chain.position,
            items=items,
            inputs=len(self._turn.items),
            response=_ENCODER.encode(self.response()),
            tokens=ExactTokens(fingerprint=self._fingerprint, token_ids=tokens),
        )

    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        self._response.model = context.adapter or context.model.name
        self._fingerprint = context.model.fingerprint
        valid = await validate_turn(context, self._body, self._turn, self._offered)
        self._chat = valid.chat
        self._output = valid.chat.output()
        self._response.truncated = valid.truncated
        self.running.started = True
        return (valid.chat.request,)

    async def whole(self, runs: Sequence[Run]) -> bytes:
        [self._run] = runs
        await self.running.unless_cancelled(self._run.read(self._take))
        if self._run.cut is not None and not self._run.tokens:
            raise self._run.cut
        await self._finish()
        return _ENCODER.encode(self._response)

    async def send(self, events: EventStream, index: int, run: Run) -> None:
        self._run = run
        self._begin()
        await self._send_unsent(events)
        await self.running.unless_cancelled(self._read(events))
        await self._finish()
        kind = "response.completed" if self._response.status == "completed" else "response.incomplete"
        self._emit(kind, response=self._response)
        await self._send_unsent(events)

    def error_messages(self, error: Exception) -> Sequence[bytes]:
        if not self._sequence_number:
            self._begin()
        self._response.status = "failed"
        self._response.error = ResponseFailure(openai_code(kind_of(error)), message_of(error))
        self._emit("response.failed", response=self.response())
        return self._taken()

    def _begin(self) -> None:
        self._emit("response.created", response=self._response)
        self._emit("response.in_progress", response=self._response)

    async def _read(self, events: EventStream) -> None:
        async for ready in self._run:
            for pieces in ready:
                self._take(pieces)
            await self._send_unsent(events)

    def _take(self, pieces: Sequence[Piece]) -> None:
        self._token_ids += [piece.token.token_id for piece in pieces]
        self._items.take(self._output.push(pieces, pieces[-1].finish))
        if not self._output.wanted:
            self._run.end()

    async def _finish(self) -> None:
        """Complete the response and store it, before its client hears of its end and continues it."""
        run, response = self._run, self._response
        if self._output.finish is None:
            # It was cancelled, or its deadline passed between two pieces.
            run.end()
            self._items.take(self._output.push((), run.finish))
        response.status = "completed"
        if self.running.cancelled:
            response.status = "cancelled"
        elif self._output.finish == "length":
            response.status = "incomplete"
            reason = "max_output_tokens" if run.cut is None else "deadline_exceeded"
            response.incomplete_details = IncompleteDetails(reason)
        self._items.end("completed" if response.status == "completed" else "incomplete")
        response.output = self._items.items
        response.completed_at = int(time.time())
        response.usage = self._usage()
        if response.store:
            await self._turn.commit(self.node())
        self.running.ended.set()

    def _usage(self) -> ResponseUsage:
        prompt, output = len(self._chat.request.prompt), self._run.tokens
        return ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(self._run.cached_tokens),
            output_tokens=output,
            output_tokens_details=OutputTokensDetails(self._output.thought_tokens),
            total_tokens=prompt + output,
        )

    def _emit(self, kind: str, /, **fields: Any) -> None:
        if self.streamed:
            event = ResponseEvent(type=kind, sequence_number=self._sequence_number, **fields)
            self._sequence_number += 1
            self._unsent.append(named(kind, _ENCODER.encode(event)))

    def _taken(self) -> list[bytes]:
        taken, self._unsent = self._unsent, []
        return taken

    async def _send_unsent(self, events: EventStream) -> None:
        await events.send(*self._taken())


def _response_of(body: ResponseRequest, turn: Turn) -> ResponseObject:
    """Return the response before its first token."""
    asked = None if body.text is None else body.text.format
    return ResponseObject(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=body.model or "",
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        conversation=None if turn.head is None else ConversationName(id=turn.head.id),
        reasoning=body.reasoning or Reasoning(),
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": {"type": "text"} if asked is None else msgspec.to_builtins(asked)},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
    )

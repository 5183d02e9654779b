"""Replies of ``/v1/responses``, whole and streamed."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.api.error_table import kind_of
from caravan_dialects.api.errors import ContextLengthError, NotStoredError
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.comparison import RememberedRequests
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run, together
from caravan_dialects.api.generation.serving import used_tier
from caravan_dialects.api.openai.chat.output import ChatOutput, read_outputs
from caravan_dialects.api.openai.errors import OPENAI, openai_code, openai_message
from caravan_dialects.api.openai.responses.diagnostics import diagnosed, fingerprint
from caravan_dialects.api.openai.responses.mcp_tools import mcp_entries
from caravan_dialects.api.openai.responses.other_items import plain_items
from caravan_dialects.api.openai.responses.output import Growing, OutputItems
from caravan_dialects.api.openai.responses.output_parts import OutputParts, Plan
from caravan_dialects.api.openai.responses.running import RunningResponse
from caravan_dialects.api.openai.responses.schema import (
    ConversationName,
    IncompleteDetails,
    Reasoning,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseRequest,
)
from caravan_dialects.api.openai.responses.socket_schema import CreateEvent, StreamId
from caravan_dialects.api.openai.responses.tool_loop import LoopEnd, LoopRequest, LoopState, Tell, ToolLoop
from caravan_dialects.api.openai.responses.tools import ITEMS_WITH_TOOLS, OfferedTools, offered_tools, shown_tools
from caravan_dialects.api.openai.responses.turn import Turn
from caravan_dialects.api.openai.responses.validation import generates, validate_turn, wants_logprobs
from caravan_dialects.api.stream import NAMED_EVENTS, Events, named
from caravan_dialects.conversations.nodes import ExactTokens, Node, new_id
from caravan_scheduler.core.errors import TextTooLongError

_ENCODER = msgspec.json.Encoder()
# Items of an output for which no client has to send anything.
_WITHOUT_RESULTS = frozenset({"message", "reasoning", "mcp_call", "mcp_list_tools"})
_log = logging.getLogger(__name__)


class PartialResponse:
    """``head``: the response without its items. ``items``: those of its output, each growth of which is an event.

    ``next``: the number of the next event.
    """

    def __init__(
        self, head: ResponseObject, offered: OfferedTools, *, streamed: bool, lane: StreamId = msgspec.UNSET
    ) -> None:
        """``streamed``: whether there are events. ``lane``: the ``stream_id`` that they have."""
        self.head = head
        self.items = OutputItems(Growing(head.id, self.emit), offered)
        self.next = 0
        self._streamed = streamed
        self._lane = lane
        self._unsent: list[bytes] = []

    def response(self) -> ResponseObject:
        """Return the response as clients see it."""
        return msgspec.structs.replace(self.head, output=self.items.items)

    def begin(self) -> None:
        """Announce the response."""
        self.emit("response.created", response=self.head)
        self.emit("response.in_progress", response=self.head)

    def announce_end(self) -> None:
        """Announce the whole response, which is not a failed one."""
        kind = "response.completed" if self.head.status == "completed" else "response.incomplete"
        self.emit(kind, response=self.head)

    def announce_queued(self) -> None:
        """Announce a response that waits."""
        self.head.status = "queued"
        self.emit("response.created", response=self.head)
        self.emit("response.queued", response=self.head)

    def start(self) -> None:
        """Note that the response is no longer queued."""
        if self.head.status == "queued":
            self.head.status = "in_progress"
            self.emit("response.in_progress", response=self.head)

    def fail(self, error: Exception) -> None:
        """Announce that the response ends with ``error``, and begin it before if it has not begun."""
        if not self.next:
            self.begin()
        self.head.status = "failed"
        self.head.error = ResponseFailure(openai_code(kind_of(error)), openai_message(error))
        self.emit("response.failed", response=self.response())

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Add an event, if the reply is streamed."""
        if self._streamed:
            event = ResponseEvent(type=kind, sequence_number=self.take_number(), stream_id=self._lane, **fields)
            self._unsent.append(named(kind, _ENCODER.encode(event)))

    def take_number(self) -> int:
        """Return the number of the next event, which is not that of a later one."""
        self.next += 1
        return self.next - 1

    def take_unsent(self) -> list[bytes]:
        """Return the messages since the last call."""
        taken, self._unsent = self._unsent, []
        return taken


def new_response(body: ResponseRequest, turn: Turn) -> ResponseObject:
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
        tools=shown_tools(body.tools or ()),
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        metadata=body.metadata or {},
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        top_logprobs=body.top_logprobs or 0,
        max_tool_calls=body.max_tool_calls,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        background=bool(body.background),
    )


class AskedResponse(Asked):
    """One turn. ``running``: its response, for others to see."""

    dialect = OPENAI
    framing = NAMED_EVENTS
    operation = "chat"
    # Agents look for this error in a stream.
    errors_as_events = (ContextLengthError, TextTooLongError)

    def __init__(
        self, body: ResponseRequest, turn: Turn, remembered: RememberedRequests, head: ResponseObject | None = None
    ) -> None:
        """``remembered``: requests that this one may be compared with. ``head``: the response, if it is not a new one.

        Raises ValidationError.
        """
        self._remembered = remembered
        self._body = body
        self._turn = turn
        offered = offered_tools(body.tools or (), turn.all_items)
        streamed = bool(body.stream or body.background)
        lane = body.stream_id if isinstance(body, CreateEvent) and body.stream_id is not None else msgspec.UNSET
        self._partial = PartialResponse(head or new_response(body, turn), offered, streamed=streamed, lane=lane)
        self.model = body.model
        self.streamed = bool(body.stream)
        conversation = "" if turn.head is None else turn.head.id
        self.running = RunningResponse(id=self._partial.head.id, owner=turn.owner, conversation=conversation)

    def _begin_anew(self, status: str) -> None:
        """Forget the output and its events."""
        head = msgspec.structs.replace(self._partial.head, status=status)
        self._partial = PartialResponse(head, self._partial.items.offered, streamed=True)

    @property
    def skipped_tools(self) -> frozenset[str]:
        """Types of tools that the model is not offered."""
        return self._partial.items.offered.skipped

    @property
    def skipped_items(self) -> frozenset[str]:
        """Types of items of which the model is shown nothing."""
        kinds = (item["type"] for item in self._turn.items if not plain_items(item))
        return frozenset(kinds) - ITEMS_WITH_TOOLS

    async def validate(self, context: Context) -> "ResponseAnswer":
        plan = await self._validated(context)
        answer = ResponseAnswer(self._turn, self._partial, self.running, plan)
        self.running.begin(answer)
        return answer

    async def _validated(self, context: Context, state: LoopState | None = None) -> Plan:
        """``state``: of a loop that goes on, whose items the response has."""
        loop = None
        if entries := mcp_entries(self._body.tools or (), context.tool_servers.names):
            asked = LoopRequest(body=self._body, turn=self._turn, entries=entries, session=self._partial.head.id)
            loop = ToolLoop(context, asked, self._partial.items, state)
            valid = await loop.first()
        else:
            valid = await validate_turn(context, self._body, self._turn, self._partial.items.offered)
        head, sampling = self._partial.head, valid.chat.request.specs[0].sampling
        head.model = context.adapter or context.model.name
        head.truncated = valid.truncated
        # What is not set may be a default of the model.
        head.temperature = sampling.temperature if self._body.temperature is None else self._body.temperature
        head.top_p = sampling.top_p if self._body.top_p is None else self._body.top_p
        now = fingerprint(context, self._body, self._turn.all_items, valid)
        head.prompt_cache_diagnostics = diagnosed(self._remembered, self._turn.owner, self._body, now)
        self._remembered.remember(self._turn.owner, head.id, now)
        return Plan(
            chat=valid.chat,
            loop=loop,
            output=generates(self._body),
            logprobs=wants_logprobs(self._body),
            fingerprint=context.model.fingerprint,
        )

    def error_messages(self, error: Exception) -> Sequence[bytes]:
        self._partial.fail(error)
        return self._partial.take_unsent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How a response is delivered. ``read``: reads an output to its end. ``show``, ``save``: see `ToolLoop`."""

    read: Callable[[ChatOutput], Awaitable[None]]
    show: Tell
    save: Tell


async def _tell_nobody() -> None:
    pass


class ResponseAnswer(Answer):
    """Answers one turn with messages, thoughts and calls, and stores it.

    With MCP servers, it is generated part by part, with calls between them.
    """

    def __init__(self, turn: Turn, partial: PartialResponse, running: RunningResponse, plan: Plan) -> None:
        super().__init__((plan.chat.request,) if plan.is_ready else ())
        self._turn = turn
        self._partial = partial
        self._running = running
        self._plan = plan
        self._parts = OutputParts(plan, partial.items)
        partial.head.service_tier = used_tier(plan.chat.request.specs[0].priority)
        # Why the response is incomplete, if a limit of the loop has ended it, and whether all parts were read.
        self._cut: str | None = None
        self._read_all = False

    def response(self) -> ResponseObject:
        return self._partial.response()

    def take_number(self) -> int:
        """Return the number of an event that others make of this response."""
        return self._partial.take_number()

    def steer(self) -> None:
        """End the output where it is, unless it has calls: their results must come before anything else."""
        if not self._partial.items.waiting and all(
            item["type"] in _WITHOUT_RESULTS for item in self._partial.items.items
        ):
            self._running.steer()

    def node(self) -> Node:
        items = (*self._turn.items, *self._partial.items.items)
        return Node(
            id=self._partial.head.id,
            parent=self._turn.chain.position,
            items=items,
            inputs=len(self._turn.items),
            response=_ENCODER.encode(self.response()),
            tokens=self._parts.exact_tokens(),
        )

    async def whole(self, runs: Sequence[Run]) -> bytes:
        async def read(output: ChatOutput) -> None:
            await read_outputs([output], [self._parts.take])

        await self._respond(runs, Delivery(read=read, show=_tell_nobody, save=_tell_nobody))
        return _ENCODER.encode(self._partial.head)

    async def stream(self, events: Events, runs: Sequence[Run]) -> None:
        # A task of its own, see `on_all`.
        await together([self._stream(events, runs)])

    async def _stream(self, events: Events, runs: Sequence[Run]) -> None:
        async def show() -> None:
            await events.send(*self._partial.take_unsent())

        async def read(output: ChatOutput) -> None:
            async for ready in output.run:
                for pieces in ready:
                    self._parts.take(pieces, output.push(pieces))
                await events.send(*self._partial.take_unsent())

        self._partial.begin()
        await show()
        await self._respond(runs, Delivery(read=read, show=show, save=show))
        self._partial.announce_end()
        await show()

    async def _respond(self, runs: Sequence[Run], delivery: Delivery) -> None:
        """Generate the response, whose first part is the run of ``runs`` if there is one, and store it."""
        with ExitStack() as held:
            if runs:
                self._parts.begin(runs[0])
            await self._running.unless_stopped(self._generate(delivery, held))
            await self._finish()

    async def _generate(self, delivery: Delivery, held: ExitStack) -> None:
        """Read all parts. ``held`` gets the runs of those that are submitted here."""
        loop, parts = self._plan.loop, self._parts
        if loop is not None:
            loop.starts(parts.chat.request.specs[0].timeout_s)
            if not loop.is_ready:
                await loop.prepare(delivery.show, delivery.save)
                await self._take_up(loop, None)
        if parts.output is None:
            self._submit(held)
        while True:
            assert parts.output is not None
            await delivery.read(parts.output)
            parts.end()
            if loop is None or not await self._call(loop, delivery):
                break
            self._submit(held)
        self._read_all = True

    def _submit(self, held: ExitStack) -> None:
        """Submit the next part."""
        self._parts.begin(held.enter_context(self.submit(Run, self._parts.chat.request)))

    async def _call(self, loop: ToolLoop, delivery: Delivery) -> bool:
        """Make the calls of the part that was read, and note what comes next. Return whether anything does."""
        parts = self._parts
        if parts.output is None or parts.output.finish != "tool_calls":
            return False
        try:
            if not await loop.call(delivery.save):
                return False
            parts.count()
            await self._take_up(loop, parts.exact_tokens())
        except LoopEnd as end:
            self._cut = end.reason
            return False
        return True

    async def _take_up(self, loop: ToolLoop, exact: ExactTokens | None) -> None:
        """Take up the prompt with the items so far. Raises LoopEnd."""
        parts = self._parts
        valid = await loop.next(exact, parts.generated, parts.chat.request.specs[0].sampling.seed)
        self._partial.head.truncated = valid.truncated
        parts.take_up(valid.chat)
        self.requests = (*self.requests, valid.chat.request)

    async def _finish(self) -> None:
        """Complete the response and store it, before its client hears of its end and continues it."""
        self._running.note_end()
        self._complete()
        if self._partial.head.store:
            await self._store(self._partial.head)
        if not self._partial.head.store:
            self._turn.keep(self.node())
        self._running.ended.set()

    def _complete(self) -> None:
        """End the output, and note what is known then."""
        response, items, parts = self._partial.head, self._partial.items, self._parts
        steered = self._running.steered and not self._read_all
        parts.end()
        response.status = "completed"
        if self._running.cancelled:
            response.status = "cancelled"
        elif (reason := "steered" if steered else self._cut or parts.cut()) is not None:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails(reason)
        if self._plan.output:
            items.end("completed" if response.status == "completed" else "incomplete", may_be_empty=steered)
        response.output = items.items
        response.completed_at = int(time.time())
        response.usage = parts.usage()

    async def _store(self, response: ResponseObject) -> None:
        """Raises HeadMovedError, and NotStoredError in a conversation, which must not lose a turn silently."""
        try:
            await self._turn.commit(self.node())
        except NotStoredError:
            if self._turn.head is not None:
                raise
            # It was computed, so its client gets it, and reads that it cannot be continued.
            response.store = False
            _log.warning("a response was not stored and is answered with `store` false")

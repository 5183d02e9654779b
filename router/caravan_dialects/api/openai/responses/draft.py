"""A response as far as it has come, with the events of its growth that its client has not got yet."""

import time
from typing import Any

import msgspec

from caravan_dialects.api.errors import kind_of
from caravan_dialects.api.openai.errors import openai_code, openai_message
from caravan_dialects.api.openai.responses.output import OutputItems
from caravan_dialects.api.openai.responses.schema import (
    ConversationName,
    Reasoning,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseRequest,
)
from caravan_dialects.api.openai.responses.tools import OfferedTools, shown_tools
from caravan_dialects.api.openai.responses.turn import Turn
from caravan_dialects.api.stream import named
from caravan_dialects.conversations.nodes import new_id

_ENCODER = msgspec.json.Encoder()


class Draft:
    """``head``: the response but for its items. ``items``: those of its output, each growth of which is an event."""

    def __init__(self, body: ResponseRequest, turn: Turn, offered: OfferedTools) -> None:
        self.head = _response_of(body, turn)
        self.items = OutputItems(self.emit, offered)
        self._streamed = bool(body.stream)
        # Messages that are not sent yet, and the number of all messages so far.
        self._unsent: list[bytes] = []
        self._sequence_number = 0

    def response(self) -> ResponseObject:
        """Return the response as clients see it."""
        return msgspec.structs.replace(self.head, output=self.items.items)

    def begin(self) -> None:
        """Announce the response."""
        self.emit("response.created", response=self.head)
        self.emit("response.in_progress", response=self.head)

    def fail(self, error: Exception) -> None:
        """Announce that the response ends with ``error``, and begin it before if it has not begun."""
        if not self._sequence_number:
            self.begin()
        self.head.status = "failed"
        self.head.error = ResponseFailure(openai_code(kind_of(error)), openai_message(error))
        self.emit("response.failed", response=self.response())

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Add an event, if the reply is streamed."""
        if self._streamed:
            event = ResponseEvent(type=kind, sequence_number=self._sequence_number, **fields)
            self._sequence_number += 1
            self._unsent.append(named(kind, _ENCODER.encode(event)))

    def take_unsent(self) -> list[bytes]:
        """Return the messages since the last call."""
        taken, self._unsent = self._unsent, []
        return taken


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
    )

"""Turns the parts of an output into items: messages, thoughts and calls, with the events of their growth."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, assert_never

import msgspec

from caravan_dialects.api.openai.chat.output import Part, token_logprob
from caravan_dialects.api.openai.responses.items import (
    custom_call_item,
    function_call_item,
    message_item,
    reasoning_item,
    text_part,
    tool_search_item,
)
from caravan_dialects.api.openai.responses.tools import OfferedTools, ToolName, custom_input, search_arguments
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart
from caravan_dialects.conversations.nodes import Json
from caravan_dialects.text.assembler import Piece


class Emit(Protocol):
    """Sends an event of this type with these fields."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Growing:
    """The response whose items grow: its ``id``, and ``emit`` for the event of each growth."""

    id: str
    emit: Emit


class OpenItem(ABC):
    """``index``: its place in the output.

    Its id follows from that of the response and its place. So it stays the same from the first event to the last, also
    if another router continues the response.
    """

    prefix: str

    def __init__(self, response: Growing, index: int) -> None:
        self._emit = response.emit
        self._texts: list[str] = []
        self.index = index
        name = hashlib.blake2b(f"{response.id} {index}".encode(), digest_size=28).hexdigest()
        self.id = f"{self.prefix}_{name[:32]}"
        # Of a call.
        self._call_id = f"call_{name[32:]}"

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def item(self, status: str) -> Json:
        """Return the item as far as it has come."""

    def begin(self) -> None:
        """Announce the item, which is empty."""
        self._emit("response.output_item.added", output_index=self.index, item=self.item("in_progress"))

    def add(self, text: str) -> None:
        """Append to the item."""
        self._texts.append(text)

    def end(self, status: str) -> Json:
        """Announce the whole item and return it."""
        item = self.item(status)
        self._emit("response.output_item.done", output_index=self.index, item=item)
        return item

    def _tell(self, kind: str, /, **fields: Any) -> None:
        self._emit(kind, output_index=self.index, item_id=self.id, **fields)


class OpenMessage(OpenItem):
    prefix = "msg"

    def __init__(self, response: Growing, index: int) -> None:
        super().__init__(response, index)
        self._logprobs: list[Json] = []

    def item(self, status: str) -> Json:
        # A message that has just begun has no part yet: an event of its own adds it.
        parts = [] if status == "in_progress" else [self._part()]
        return message_item(self.id, "assistant", parts, status)

    def _part(self) -> Json:
        return text_part("output_text", self.text) | {"logprobs": self._logprobs}

    def begin(self) -> None:
        super().begin()
        self._tell("response.content_part.added", content_index=0, part=text_part("output_text", ""))

    def add(self, text: str, logprobs: Sequence[Json] = ()) -> None:
        super().add(text)
        self._logprobs += logprobs
        self._tell("response.output_text.delta", content_index=0, delta=text, logprobs=[*logprobs])

    def end(self, status: str) -> Json:
        self._tell("response.output_text.done", content_index=0, text=self.text, logprobs=self._logprobs)
        self._tell("response.content_part.done", content_index=0, part=self._part())
        return super().end(status)


class OpenThought(OpenItem):
    prefix = "rs"

    def item(self, status: str) -> Json:
        return reasoning_item(self.id, self.text, status)

    def add(self, text: str) -> None:
        super().add(text)
        self._tell("response.reasoning_text.delta", content_index=0, delta=text)

    def end(self, status: str) -> Json:
        self._tell("response.reasoning_text.done", content_index=0, text=self.text)
        return super().end(status)


class OpenCall(OpenItem):
    prefix = "fc"

    def __init__(self, response: Growing, index: int, tool: ToolName) -> None:
        super().__init__(response, index)
        self._tool = tool

    def item(self, status: str) -> Json:
        return function_call_item(self.id, self._call_id, self._tool, self.text, status)

    def add(self, text: str) -> None:
        super().add(text)
        self._tell("response.function_call_arguments.delta", delta=text)

    def end(self, status: str) -> Json:
        self._tell("response.function_call_arguments.done", name=self._tool.name, arguments=self.text)
        return super().end(status)


class OpenSearch(OpenItem):
    """Its arguments are an object, so that they are known only when the call is whole."""

    prefix = "tsc"

    def item(self, status: str) -> Json:
        given = {} if status == "in_progress" else search_arguments(self.text)
        return tool_search_item(self.id, self._call_id, given, status)


class OpenCustomCall(OpenItem):
    """The model writes the input inside JSON, so that it is known only when the call is whole."""

    prefix = "ctc"

    def __init__(self, response: Growing, index: int, tool: ToolName) -> None:
        super().__init__(response, index)
        self._tool = tool

    def item(self, status: str) -> Json:
        given = "" if status == "in_progress" else custom_input(self.text)
        return custom_call_item(self.id, self._call_id, self._tool, given, status)

    def end(self, status: str) -> Json:
        given = custom_input(self.text)
        self._tell("response.custom_tool_call_input.delta", delta=given)
        self._tell("response.custom_tool_call_input.done", input=given)
        return super().end(status)


class OpenMcpCall(OpenItem):
    """A call of a tool of an MCP server. It is whole when the model has written it, and ends with its result."""

    prefix = "mcp"

    def __init__(self, response: Growing, index: int, tool: ToolName, approval: str | None = None) -> None:
        """``approval``: id of the request for approval that the client has answered."""
        super().__init__(response, index)
        self.tool = tool
        self._approval = approval
        self._output: str | None = None
        self._error: Json | None = None

    def item(self, status: str) -> Json:
        return {
            "id": self.id,
            "type": "mcp_call",
            "status": status,
            "approval_request_id": self._approval,
            "server_label": self.tool.namespace,
            "name": self.tool.name,
            "arguments": self.text,
            "output": self._output,
            "error": self._error,
        }

    def begin(self) -> None:
        super().begin()
        self._tell("response.mcp_call.in_progress")

    def add(self, text: str) -> None:
        super().add(text)
        self._tell("response.mcp_call_arguments.delta", delta=text)

    def complete(self) -> None:
        """Announce the whole arguments."""
        self._tell("response.mcp_call_arguments.done", arguments=self.text)

    def restore(self, arguments: str) -> None:
        """Set the arguments, which have been announced."""
        self._texts = [arguments]

    def settle(self, output: str | None, error: Json | None) -> Json:
        """End the call with its result, one of both, and return the item."""
        self._output, self._error = output, error
        self._tell("response.mcp_call.completed" if error is None else "response.mcp_call.failed")
        return self.end("completed" if error is None else "failed")


class OpenApproval(OpenItem):
    """A call that the client has to approve."""

    prefix = "mcpr"

    def __init__(self, response: Growing, index: int, tool: ToolName) -> None:
        super().__init__(response, index)
        self._tool = tool

    def item(self, status: str) -> Json:
        called = {"server_label": self._tool.namespace, "name": self._tool.name, "arguments": self.text}
        return {"id": self.id, "type": "mcp_approval_request", **called}


class OpenMcpList(OpenItem):
    """The tools of an MCP server that the model may use."""

    prefix = "mcpl"

    def __init__(self, response: Growing, index: int, label: str) -> None:
        super().__init__(response, index)
        self._label = label
        self._tools: list[Json] = []
        self._error: str | None = None

    def item(self, status: str) -> Json:
        error = "the response ended before the list" if status == "incomplete" else self._error
        listed = {"server_label": self._label, "tools": self._tools, "error": error}
        return {"id": self.id, "type": "mcp_list_tools", **listed}

    def begin(self) -> None:
        super().begin()
        self._tell("response.mcp_list_tools.in_progress")

    def settle(self, tools: list[Json], error: str | None) -> Json:
        """End the list with ``tools``, or with what has failed, and return the item."""
        self._tools, self._error = tools, error
        self._tell("response.mcp_list_tools.completed" if error is None else "response.mcp_list_tools.failed")
        return self.end("completed")


TextItem = TypeVar("TextItem", OpenMessage, OpenThought)


class OutputItems:
    """The items of one response. Their growth is told in the order that OpenAI's clients expect.

    ``offered``: the tools that the model may call. ``waiting``: calls of MCP servers that have no result yet.
    """

    def __init__(self, response: Growing, offered: OfferedTools) -> None:
        self._response = response
        self.offered = offered
        self.waiting: list[OpenMcpCall] = []
        self._ended: list[Json] = []
        self._open: OpenItem | None = None

    @property
    def items(self) -> list[Json]:
        """All items, the last one as far as it has come."""
        return self._ended if self._open is None else [*self._ended, self._open.item("incomplete")]

    def restore(self, items: Sequence[Json]) -> None:
        """Begin with ``items``, which have been announced."""
        self._ended = [*items]
        for index, item in enumerate(items):
            if item["type"] == "mcp_call" and item["status"] == "in_progress":
                tool = ToolName(item["name"], item["server_label"])
                call = OpenMcpCall(self._response, index, tool, item["approval_request_id"])
                call.restore(item["arguments"])
                self.waiting.append(call)

    def take(self, parts: Sequence[Part], logprobs: Sequence[Json] = ()) -> None:
        """Add the next parts of the output. ``logprobs``: of the tokens of their texts."""
        for part in parts:
            match part:
                case ThoughtPart():
                    self._text_item(OpenThought).add(part.text)
                case TextPart():
                    self._text_item(OpenMessage).add(part.text, logprobs)
                    logprobs = ()
                case CallPart():
                    self._call_item(part.name).add(part.arguments)
                case _:
                    assert_never(part)

    def end(self, status: str, *, may_be_empty: bool = False) -> None:
        """End the last item, which is "completed" or "incomplete". Thoughts alone get an empty message.

        ``may_be_empty``: they get none.
        """
        if not may_be_empty and all(item["type"] == "reasoning" for item in self.items):
            self._text_item(OpenMessage)
        self._end_item(status)
        for call in self.waiting:
            self._ended[call.index] = call.end("incomplete")
        self.waiting.clear()

    def end_turn(self) -> None:
        """End the last item of a part of the output that calls tools."""
        self._end_item("completed")

    def begin_call(self, tool: ToolName, arguments: str, approval: str) -> None:
        """Add a call that waits, for which the client has answered the request for ``approval``."""
        call = OpenMcpCall(self._response, len(self._ended), tool, approval)
        call.begin()
        call.add(arguments)
        self._hold(call)

    def settle(self, call: OpenMcpCall, output: str | None, error: Json | None) -> None:
        """End one of the calls that wait."""
        self.waiting.remove(call)
        self._ended[call.index] = call.settle(output, error)

    def begin_list(self, label: str) -> OpenMcpList:
        """Announce the tools of a server, which `end_list` has."""
        opened = self._open = OpenMcpList(self._response, len(self._ended), label)
        opened.begin()
        return opened

    def end_list(self, opened: OpenMcpList, tools: list[Json], error: str | None) -> None:
        self._open = None
        self._ended.append(opened.settle(tools, error))

    def _hold(self, call: OpenMcpCall) -> None:
        call.complete()
        self._ended.append(call.item("in_progress"))
        self.waiting.append(call)

    def _text_item(self, kind: type[TextItem]) -> TextItem:
        if not isinstance(self._open, kind):
            self._end_item("completed")
            self._open = kind(self._response, len(self._ended))
            self._open.begin()
        return self._open

    def _call_item(self, name: str | None) -> OpenItem:
        """Return the call that is being read, or the call of ``name`` that begins."""
        if name is not None:
            self._end_item("completed")
            self._open = self._new_call(name, len(self._ended))
            self._open.begin()
        assert self._open is not None
        return self._open

    def _new_call(self, name: str, index: int) -> OpenItem:
        offered = self.offered
        tool = offered.client_name(name)
        if offered.is_search(name):
            return OpenSearch(self._response, index)
        if name in offered.mcp:
            return (OpenApproval if offered.mcp[name] else OpenMcpCall)(self._response, index, tool)
        return (OpenCustomCall if name in offered.custom else OpenCall)(self._response, index, tool)

    def _end_item(self, status: str) -> None:
        opened, self._open = self._open, None
        if isinstance(opened, OpenMcpCall) and status == "completed":
            self._hold(opened)
        elif opened is not None:
            self._ended.append(opened.end(status))


class MessageTokens:
    """Finds the tokens that a text of the answer was made of, among all tokens of an output.

    Readers hold text back that may become the mark of a thought or of a call, so that a text may come with a later
    token than its own, and tokens that were such marks belong to no text.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def of(self, pieces: Sequence[Piece], parts: Sequence[Part]) -> list[Json]:
        """Return an entry for each token of the texts in ``parts``, which ``pieces`` have completed.

        Control tokens, such as the end, are part of no text.
        """
        self._pieces += [piece for piece in pieces if not piece.token.special]
        if not parts:
            return []
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        taken = self._last(text) if text else []
        self._pieces.clear()
        return [msgspec.to_builtins(token_logprob(piece)) for piece in taken]

    def _last(self, text: str) -> list[Piece]:
        """Return the last tokens that have ``text``, with those before them that have parts of its characters only."""
        start, covered = len(self._pieces), 0
        while start and (covered < len(text) or not self._pieces[start - 1].text):
            start -= 1
            covered += len(self._pieces[start].text)
        return self._pieces[start:]

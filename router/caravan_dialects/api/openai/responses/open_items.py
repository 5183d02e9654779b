"""The item of an output that is being generated: a message, a thought or a call, and the events of its growth."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from caravan_dialects.api.openai.events import new_call_id
from caravan_dialects.api.openai.responses.items import (
    custom_call_item,
    function_call_item,
    message_item,
    reasoning_item,
    tool_search_item,
)
from caravan_dialects.api.openai.responses.parts import text_part
from caravan_dialects.api.openai.responses.tool_names import ToolName
from caravan_dialects.api.openai.responses.tools import custom_input, search_arguments
from caravan_dialects.conversations.nodes import Json, new_id


class Emit(Protocol):
    """Sends an event of this type with these fields."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


class OpenItem(ABC):
    """``index``: its place in the output. Its id stays the same from the first event to the last."""

    prefix: str

    def __init__(self, emit: Emit, index: int) -> None:
        self._emit = emit
        self._texts: list[str] = []
        self.index = index
        self.id = new_id(self.prefix)

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

    def __init__(self, emit: Emit, index: int) -> None:
        super().__init__(emit, index)
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

    def __init__(self, emit: Emit, index: int, tool: ToolName) -> None:
        super().__init__(emit, index)
        self._tool = tool
        self._call_id = new_call_id()

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

    def __init__(self, emit: Emit, index: int) -> None:
        super().__init__(emit, index)
        self._call_id = new_call_id()

    def item(self, status: str) -> Json:
        given = {} if status == "in_progress" else search_arguments(self.text)
        return tool_search_item(self.id, self._call_id, given, status)


class OpenCustomCall(OpenItem):
    """The model writes the input inside JSON, so that it is known only when the call is whole."""

    prefix = "ctc"

    def __init__(self, emit: Emit, index: int, tool: ToolName) -> None:
        super().__init__(emit, index)
        self._tool = tool
        self._call_id = new_call_id()

    def item(self, status: str) -> Json:
        given = "" if status == "in_progress" else custom_input(self.text)
        return custom_call_item(self.id, self._call_id, self._tool, given, status)

    def end(self, status: str) -> Json:
        given = custom_input(self.text)
        self._tell("response.custom_tool_call_input.delta", delta=given)
        self._tell("response.custom_tool_call_input.done", input=given)
        return super().end(status)

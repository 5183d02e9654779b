"""Turns the parts of an output into items."""

from collections.abc import Sequence
from typing import TypeVar, assert_never

from caravan_dialects.api.openai.chat.output import Part
from caravan_dialects.api.openai.responses.open_items import (
    Emit,
    OpenCall,
    OpenCustomCall,
    OpenItem,
    OpenMessage,
    OpenSearch,
    OpenThought,
)
from caravan_dialects.api.openai.responses.tools import OfferedTools
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart
from caravan_dialects.conversations.nodes import Json

TextItem = TypeVar("TextItem", OpenMessage, OpenThought)


class OutputItems:
    """The items of one output. Each call of ``emit`` is one event, in the order that OpenAI's clients expect."""

    def __init__(self, emit: Emit, offered: OfferedTools) -> None:
        self._emit = emit
        self._offered = offered
        self._ended: list[Json] = []
        self._open: OpenItem | None = None

    @property
    def items(self) -> list[Json]:
        """All items, the last one as far as it has come."""
        return self._ended if self._open is None else [*self._ended, self._open.item("incomplete")]

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

    def end(self, status: str) -> None:
        """End the last item, which is "completed" or "incomplete". Thoughts alone get an empty message."""
        if all(item["type"] == "reasoning" for item in self.items):
            self._text_item(OpenMessage)
        self._end_item(status)

    def _text_item(self, kind: type[TextItem]) -> TextItem:
        if not isinstance(self._open, kind):
            self._end_item("completed")
            self._open = kind(self._emit, len(self._ended))
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
        if self._offered.is_search(name):
            return OpenSearch(self._emit, index)
        kind = OpenCustomCall if name in self._offered.custom else OpenCall
        return kind(self._emit, index, self._offered.client_name(name))

    def _end_item(self, status: str) -> None:
        if self._open is not None:
            self._ended.append(self._open.end(status))
            self._open = None

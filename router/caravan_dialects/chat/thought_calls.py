"""Finds calls of tools that a model wrote inside its thought, and forgot to end it."""

from collections.abc import Mapping

from caravan_dialects.chat.argument_types import Schema
from caravan_dialects.chat.call_text import SPACE
from caravan_dialects.chat.tool_format import ToolFormat
from caravan_dialects.chat.tool_parser import CallPart, ToolParser


class ThoughtCalls:
    """Reads the text of thoughts in parts of any size.

    Models also think about the calls that they will write. Calls therefore count only if the thought ends with them,
    and no answer follows: their text is held back until that is decided.
    """

    __slots__ = ("_calls", "_first", "_held", "_parser")

    def __init__(
        self, tool_format: ToolFormat, functions: Mapping[str, Schema | None], max_calls: int | None = None
    ) -> None:
        """``functions``, ``max_calls``: as in `ToolParser`."""
        self._parser = ToolParser(tool_format, functions, max_calls)
        # Characters with which a call may begin.
        self._first = frozenset(trigger[0] for trigger in tool_format.triggers)
        self._held = ""
        self._calls: list[CallPart] = []

    def feed(self, text: str) -> str:
        """Read more of a thought; return what of it is certain to be no call."""
        if not self._held and self._first.isdisjoint(text):
            # White space is dropped if a call follows.
            shown = text.rstrip(SPACE)
            return shown + "".join(map(self._read, text[len(shown) :]))
        return "".join(map(self._read, text))

    def _read(self, character: str) -> str:
        self._held += character
        shown = ""
        for part in self._parser.feed(character):
            if isinstance(part, CallPart):
                self._calls.append(part)
            elif not self._calls:
                shown += part.text
                self._held = self._held[len(part.text) :]
            else:
                # The thought continues: the model only thought of the calls.
                end = len(self._held) - len(self._parser.held)
                shown, self._held = shown + self._held[:end], self._held[end:]
                self._calls = []
        return shown

    def drop(self) -> str:
        """Return what was held back: an answer follows, so that it is a thought."""
        held, self._held, self._calls = self._held, "", []
        return held

    def finish(self) -> tuple[str, list[CallPart]]:
        """Return the rest of the thought at the end of the output, and the calls at its end."""
        for part in self._parser.finish():
            if isinstance(part, CallPart):
                self._calls.append(part)
            elif self._calls and part.text.strip():
                self._calls = []
        if not self._calls:
            return self.drop(), []
        calls: list[CallPart] = []
        for part in self._calls:
            if part.name is None:
                calls[-1].arguments += part.arguments
            else:
                calls.append(CallPart(len(calls), part.name, part.arguments))
        self.drop()
        return "", calls

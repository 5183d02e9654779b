"""The deltas of a streamed chat choice."""

from collections.abc import Sequence

import msgspec

from caravan_dialects.api.openai.chat.output import Part
from caravan_dialects.api.openai.chat.schema import Delta, FunctionDelta, ToolCallDelta
from caravan_dialects.api.openai.events import new_call_id
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart


class Deltas:
    """Makes the deltas of one choice. The first has the role."""

    __slots__ = ("_started",)

    def __init__(self) -> None:
        self._started = False

    def next(self, parts: Sequence[Part], *, needed: bool) -> Delta | None:
        """Return the delta of ``parts``; None if there is nothing to send: an incomplete character or call.

        ``needed``: return an empty delta instead of None.
        """
        if not parts and not needed:
            return None
        delta = Delta()
        if not self._started:
            self._started = True
            delta.role = "assistant"
        if thought := "".join(part.text for part in parts if isinstance(part, ThoughtPart)):
            delta.reasoning_content = delta.reasoning = thought
        if text := "".join(part.text for part in parts if isinstance(part, TextPart)):
            delta.content = text
        elif delta.role is not msgspec.UNSET and not parts:
            # An output without text or calls has an empty text, as in OpenAI's API.
            delta.content = ""
        if calls := _call_deltas(parts):
            delta.tool_calls = calls
        return delta


def _call_deltas(parts: Sequence[Part]) -> list[ToolCallDelta]:
    """Merge the parts of a chunk into one delta per call: some clients treat every entry as a new call."""
    calls: list[ToolCallDelta] = []
    for part in parts:
        if not isinstance(part, CallPart):
            continue
        if part.name is not None:
            function = FunctionDelta(part.arguments, part.name)
            calls.append(ToolCallDelta(part.index, function, id=new_call_id(), type="function"))
        elif calls and calls[-1].index == part.index:
            calls[-1].function.arguments += part.arguments
        else:
            calls.append(ToolCallDelta(part.index, FunctionDelta(part.arguments)))
    return calls

"""The parts of a reply's content, made from the parts of an output as they come."""

from collections.abc import Iterable, Sequence
from typing import Any, assert_never

import msgspec

from caravan_dialects.api.gemini.replies import ReplyCall, ReplyPart
from caravan_dialects.api.openai.chat.output import Part
from caravan_dialects.api.openai.chat.whole import Call
from caravan_dialects.api.openai.events import new_call_id
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart


class ReplyParts:
    """Makes the parts of one candidate. A call is a part of its own, once it is complete."""

    __slots__ = ("_before", "_fragments", "_name", "_shows_thoughts")

    def __init__(self, *, shows_thoughts: bool) -> None:
        """``shows_thoughts``: whether the reply has parts with thoughts."""
        self._shows_thoughts = shows_thoughts
        # The kind of the last part, and the open call: its name, and the fragments of its arguments.
        self._before: type[Part] | None = None
        self._name: str | None = None
        self._fragments: list[str] = []

    def add(self, parts: Iterable[Part]) -> list[ReplyPart]:
        """Return the parts that are complete with ``parts``. A text is complete at any time."""
        made: list[ReplyPart] = []
        for part in parts:
            match part:
                case CallPart(name=name, arguments=arguments):
                    if name is not None:
                        made += self.end()
                        self._name = name
                    self._fragments.append(arguments)
                case ThoughtPart(text=text) | TextPart(text=text):
                    made += self.end()
                    if self._before not in {None, type(part)}:
                        # After a part of another kind comes a blank line, which parts do not need.
                        text = text.lstrip("\n")
                    thought = isinstance(part, ThoughtPart)
                    if text and not thought:
                        made.append(ReplyPart(text=text))
                    elif text and self._shows_thoughts:
                        made.append(ReplyPart(text=text, thought=True))
                case _:
                    assert_never(part)
            self._before = type(part)
        return made

    def end(self) -> list[ReplyPart]:
        """Return the part of the open call, if there is one."""
        name, self._name = self._name, None
        if name is None:
            return []
        text = "".join(self._fragments)
        self._fragments.clear()
        # A call that was cut off is no object: the reply shows it as text.
        if (args := _object_of(text)) is None:
            return [ReplyPart(text=Call(name, text).text)]
        return [ReplyPart(function_call=ReplyCall(id=new_call_id(), name=name, args=args))]


def merged(parts: Sequence[ReplyPart]) -> list[ReplyPart]:
    """Return ``parts`` with texts in a row as one part."""
    made: list[ReplyPart] = []
    texts: list[str] = []
    for place, part in enumerate(parts):
        if part.text is msgspec.UNSET:
            made.append(part)
            continue
        texts.append(part.text)
        following = parts[place + 1] if place + 1 < len(parts) else None
        if following is None or following.text is msgspec.UNSET or following.thought is not part.thought:
            made.append(ReplyPart(text="".join(texts), thought=part.thought))
            texts.clear()
    return made


def _object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that ``text`` is; None if it is none."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None

"""Splits a model's streamed output into text and tool calls."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from caravan_router.chat.call_reader import CallReader, Progress
from caravan_router.chat.tool_format import ToolFormat

_SPACE = " \n\r\t"
_AFTER_NAME = re.compile(r"[\[<\s]")
# Characters around and between the calls of a list.
_SEPARATORS = frozenset(_SPACE + "[],;")


@dataclass(slots=True)
class TextPart:
    text: str


@dataclass(slots=True)
class CallPart:
    """A part of call number ``index``. Only its first part has the ``name``; its joined ``arguments`` are JSON."""

    index: int
    name: str | None
    arguments: str


Part = TextPart | CallPart


class _Mode(Enum):
    TEXT = auto()
    # A call may begin here.
    READY = auto()
    NAME = auto()
    CALL = auto()


class ToolParser:
    """Reads the output in parts of any size; the result does not depend on how it was split.

    Text that may begin a call is held back until that is decided. Text that looks like a call but is not one (invalid
    JSON, unknown function) stays text. White space around calls is dropped.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        """After ``max_calls`` calls the parser is ``done`` and ignores further text."""
        self.markers = tool_format.markers
        self.calls = 0
        self.done = False
        self._format = tool_format
        self._names = names
        self._max_calls = max_calls
        self._mode = _Mode.TEXT if tool_format.closing or tool_format.listed else _Mode.READY
        self._reader = CallReader()
        self._announced = False
        # Everything read since a call may have begun, until its first part is released.
        self._raw: list[str] = []
        # The held end of the text: white space, and after it what may be the beginning of a marker.
        self._space: list[str] = []
        self._partial = ""
        # Whether the closing text of the last call is still to come.
        self._closes = False
        self._parts: list[Part] = []

    def feed(self, text: str) -> list[Part]:
        """Read the next part of the output; return the parts that are decided now."""
        self._read(text)
        return self._take_parts()

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the output."""
        if not self.done:
            if self._mode is _Mode.TEXT:
                self._release(self._partial)
            elif not self._announced and not (self._mode is _Mode.READY and self.calls):
                self._release("".join(self._raw))
            if not self.calls:
                self._add_text("".join(self._space))
        return self._take_parts()

    def _take_parts(self) -> list[Part]:
        taken, self._parts = self._parts, []
        return taken

    def _read(self, text: str) -> None:
        position = 0
        while position < len(text) and not self.done:
            if self._mode is _Mode.TEXT:
                if self._partial:
                    text, position, self._partial = self._partial + text[position:], 0, ""
                position = self._read_text(text, position)
            else:
                position += self._read_character(text[position])

    def _read_text(self, text: str, start: int) -> int:
        """Read up to and including the next marker, or all of ``text``; return the position after it."""
        markers = [self._format.opening, *([self._format.closing] if self._closes else [])]
        found = [(at, marker) for marker in markers if marker and (at := text.find(marker, start)) >= 0]
        if not found:
            held = max((overlap(text, marker, start) for marker in markers if marker), default=0)
            self._release(text[start : len(text) - held])
            self._partial = text[len(text) - held :]
            return len(text)
        at, marker = min(found)
        self._release(text[start:at])
        if marker == self._format.closing:
            self._closes = False
        else:
            self._mode = _Mode.READY
            self._raw = [marker]
        return at + len(marker)

    def _release(self, text: str) -> None:
        """Add ``text`` to the parts without the white space at its end, which is dropped if a call follows."""
        shown = text.rstrip(_SPACE)
        if shown:
            self._add_text("".join(self._space) + shown)
            self._space = []
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._parts and isinstance(last := self._parts[-1], TextPart):
            last.text += text
        else:
            self._parts.append(TextPart(text))

    def _add_call(self, name: str | None, arguments: str) -> None:
        last = self._parts[-1] if self._parts else None
        if name is None and isinstance(last, CallPart) and last.index == self.calls - 1:
            last.arguments += arguments
        else:
            self._parts.append(CallPart(self.calls - 1, name, arguments))

    def _read_character(self, character: str) -> int:
        """Return 1 if the character was read, 0 if the new mode must read it."""
        match self._mode:
            case _Mode.READY:
                return self._read_ready(character)
            case _Mode.NAME:
                return self._read_name(character)
            case _:
                return self._read_call(character)

    def _read_ready(self, character: str) -> int:
        if character == "{":
            self._begin_call(CallReader())
            return 0
        if character in _SEPARATORS:
            self._raw.append(character)
            return 1
        if self._format.bare_names and self._raw == [self._format.opening]:
            self._mode = _Mode.NAME
            return 0
        if self._raw[:1] == [self._format.opening]:
            self._give_up()
        else:
            # Only separators so far, which may begin a marker.
            self._mode = _Mode.TEXT
            self._partial, self._raw = "".join(self._raw), []
        return 0

    def _read_name(self, character: str) -> int:
        if character != "{":
            self._raw.append(character)
            return 1
        name = _AFTER_NAME.split("".join(self._raw[1:]).lstrip(), maxsplit=1)[0]
        if name not in self._names:
            self._give_up()
            return 0
        self._begin_call(CallReader(name))
        return 0

    def _begin_call(self, reader: CallReader) -> None:
        self._reader = reader
        self._announced = False
        self._mode = _Mode.CALL

    def _read_call(self, character: str) -> int:
        reader = self._reader
        progress = reader.push(character)
        if not self._announced:
            self._raw.append(character)
            if reader.name is not None and reader.has_arguments:
                if reader.name not in self._names:
                    self._give_up()
                    return 1
                self._announced = True
                self._raw = []
                self.calls += 1
                # White space before a call is not text.
                self._space = []
                self._add_call(reader.name, reader.take_arguments())
        elif fragment := reader.take_arguments():
            self._add_call(None, fragment)
        match progress:
            case Progress.MORE:
                pass
            case Progress.DONE if self._announced:
                self._end_call()
            case _ if self._announced:
                # The part that was released stays a call; the character that broke it is text.
                self._give_up()
                return 0
            case _:
                self._give_up()
        return 1

    def _end_call(self) -> None:
        if self.calls == self._max_calls:
            self.done = True
        self._closes = bool(self._format.closing)
        self._mode = _Mode.TEXT if self._closes else _Mode.READY
        self._raw = []

    def _give_up(self) -> None:
        """Treat what was read since a call may have begun as text."""
        self._mode = _Mode.TEXT
        raw, self._raw = "".join(self._raw), []
        self._release(raw)


def overlap(text: str, marker: str, start: int) -> int:
    """Return the length of the longest suffix of ``text[start:]`` that is a proper prefix of ``marker``."""
    for length in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0

"""Splits a model's streamed output into thoughts and the answer, and finds calls at the end of a thought."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from caravan_dialects.chat.argument_types import Schema
from caravan_dialects.chat.call_text import SPACE, overlap
from caravan_dialects.chat.thought_format import Beginning, ThoughtFormat
from caravan_dialects.chat.tool_format import ToolFormat
from caravan_dialects.chat.tool_parser import CallPart, TextPart, ToolParser

_SPACE = " \n\r\t"
_BLANK_LINE = "\n\n"


@dataclass(slots=True)
class ThoughtPart:
    text: str


ReadPart = ThoughtPart | TextPart


class _Mode(Enum):
    # A thought or the answer begins with the next text that is not white space.
    BEFORE = auto()
    THOUGHT = auto()
    ANSWER = auto()


class ThoughtReader:
    """Reads the output in parts of any size; the result does not depend on how it was split.

    Text that may begin a marker is held back until that is decided. White space at both ends of a thought is dropped,
    and so is white space between a thought and the answer. Where the format has several thoughts, or several parts of
    an answer, a blank line separates them.
    """

    def __init__(
        self,
        thought_format: ThoughtFormat,
        beginning: Beginning = Beginning.UNDECIDED,
        max_tokens: int | None = None,
    ) -> None:
        """``max_tokens``: the thought ends by force after so many. The model may then open another, or end it again."""
        self._max_tokens = max_tokens
        # Tokens whose text is part of a thought, markers not included.
        self.tokens = 0
        self._format = thought_format
        self._mode = _Mode.ANSWER if beginning is Beginning.ANSWER else _Mode.BEFORE
        # Whether text without an opening, in mode BEFORE, is a thought.
        self._opened = beginning is Beginning.THOUGHT
        self._may_open = True
        # Whether white space in mode BEFORE belongs to the answer that follows.
        self._keeps_space = True
        # Whether a part of the current thought has been returned.
        self._begun = False
        # Precede the next text of a thought and of the answer.
        self._before_thought = self._before_answer = ""
        # Text that may begin a marker, and white space before it that may be dropped.
        self._partial = ""
        self._space: list[str] = []
        # Positions in the output: its end, and where tokens begin of which it is not decided whether they count.
        self._position = 0
        self._starts: deque[int] = deque()
        self._parts: list[ReadPart] = []

    def feed(self, text: str) -> Sequence[ReadPart]:
        """Read the text of the next token, which may be ""; return the parts that are decided now."""
        self._starts.append(self._position)
        self._position += len(text)
        rest = self._partial + text
        self._partial = ""
        while rest:
            match self._mode:
                case _Mode.BEFORE:
                    rest = self._read_before(rest)
                case _Mode.THOUGHT:
                    rest = self._read_thought(rest)
                case _Mode.ANSWER:
                    rest = self._read_answer(rest)
        return self._take_parts()

    def finish(self) -> Sequence[ReadPart]:
        """Return what was held back, at the end of the output."""
        if self._mode is _Mode.THOUGHT or (self._mode is _Mode.BEFORE and self._opened):
            self._add_thought(self._partial)
            self._settle(self._position, counts=True)
        else:
            space = "".join(self._space) if self._keeps_space else ""
            self._add_answer(space + self._partial)
        return self._take_parts()

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the reader must see even if they are control tokens, or begin with one."""
        return self._format.controls

    @property
    def _was_forced(self) -> bool:
        return self._max_tokens is not None and self.tokens >= self._max_tokens

    def _take_parts(self) -> list[ReadPart]:
        taken, self._parts = self._parts, []
        return taken

    def _read_before(self, text: str) -> str:
        """Read up to where a thought or the answer begins; return the text from there on."""
        rest = text.lstrip(_SPACE)
        if len(rest) < len(text):
            self._space.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        opening = self._format.opening
        markers = [*([opening] if self._may_open else []), *([] if self._opened else self._format.frames)]
        for marker in markers:
            if rest.startswith(marker):
                self._pass(marker, rest[len(marker) :])
                return rest[len(marker) :]
        if any(marker.startswith(rest) for marker in markers):
            self._partial = rest
            return ""
        if self._opened:
            self._begin_thought()
        else:
            self._mode = _Mode.ANSWER
            if self._keeps_space:
                self._add_answer("".join(self._space))
            self._space = []
        return rest

    def _read_thought(self, text: str) -> str:
        """Read up to and including the closing, or all of ``text``; return the text after it."""
        closing = self._format.closing
        at = text.find(closing)
        end = len(text) - overlap(text, closing, 0) if at < 0 else at
        self._add_thought(text[:end])
        self._settle(self._position - len(text) + end, counts=True)
        if at < 0:
            self._partial = text[end:]
            return ""
        self._pass(closing, text[at + len(closing) :])
        return text[at + len(closing) :]

    def _read_answer(self, text: str) -> str:
        """Read up to and including the next marker, or all of ``text``; return the text after it."""
        markers = self._format.frames + ((self._format.opening,) if self._format.recurs else ())
        if self._was_forced:
            markers = (*markers, self._format.opening, self._format.closing)
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._add_answer(text[:at])
            self._pass(marker, text[at + len(marker) :])
            return text[at + len(marker) :]
        end = len(text) - max((overlap(text, marker, 0) for marker in markers), default=0)
        self._add_answer(text[:end])
        self._partial = text[end:]
        self._settle(self._position - len(self._partial), counts=False)
        return ""

    def _pass(self, marker: str, rest: str) -> None:
        """Change the mode behind a marker that ``rest`` follows."""
        self._settle(self._position - len(rest), counts=False)
        if self._mode is _Mode.ANSWER:
            self._before_answer = _BLANK_LINE
        elif self._mode is _Mode.THOUGHT and self._begun:
            self._before_thought = _BLANK_LINE
        self._space = []
        self._opened = self._keeps_space = False
        if marker == self._format.opening:
            self._begin_thought()
        else:
            self._may_open = self._format.recurs or self._was_forced
            self._mode = _Mode.BEFORE

    def _begin_thought(self) -> None:
        self._mode = _Mode.THOUGHT
        self._space = []
        self._begun = False

    def _settle(self, end: int, *, counts: bool) -> None:
        """Count the undecided tokens that begin before position ``end``, or forget them."""
        while self._starts and self._starts[0] < end:
            self._starts.popleft()
            self.tokens += counts

    def _add_thought(self, text: str) -> None:
        """Add ``text`` to the parts without the white space at its end, which is dropped if the thought ends there."""
        kept = text.rstrip(_SPACE)
        if kept:
            shown = "".join(self._space) + kept
            self._add(ThoughtPart(shown if self._begun else self._before_thought + shown.lstrip(_SPACE)))
            self._begun = True
            self._space = []
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def _add_answer(self, text: str) -> None:
        if text:
            self._add(TextPart(self._before_answer + text))
            self._before_answer = ""

    def _add(self, part: ReadPart) -> None:
        last = self._parts[-1] if self._parts else None
        if type(last) is type(part) and last is not None:
            last.text += part.text
        else:
            self._parts.append(part)


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

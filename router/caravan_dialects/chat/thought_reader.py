"""Splits a model's streamed output into thoughts and the answer."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from caravan_dialects.chat.call_text import overlap
from caravan_dialects.chat.thought_format import Beginning, ThoughtFormat
from caravan_dialects.chat.tool_parser import TextPart

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

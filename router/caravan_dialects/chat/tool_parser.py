"""Splits a model's streamed output into text and tool calls."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

from caravan_dialects.chat.argument_types import Schema, resolved
from caravan_dialects.chat.call_reader import CallReader
from caravan_dialects.chat.call_text import SPACE, CallText, Reading, overlap
from caravan_dialects.chat.json_mender import JsonMender, Progress
from caravan_dialects.chat.literal_reader import LiteralReader
from caravan_dialects.chat.tag_reader import TagReader
from caravan_dialects.chat.tool_format import CONTROL, HOLE, NAME, Style, ToolFormat, units

# Characters around and between the calls of a list.
_LIST = "[],;"
_NAME_ENDS = SPACE + CONTROL + "<[](){}\"'>:=,"
# Longest texts of a name, an id, and what stands between a name and its arguments.
_MAX_NAME = 128
_MAX_ID = 128
_MAX_HEADER = 300
_NAMESPACE = "functions."


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


class ToolParser:
    """Reads the output in parts of any size; the result does not depend on how it was split.

    Text that may begin a call is held back until that is decided. Text that looks like a call but is not one (invalid
    JSON, unknown function) stays text. White space around calls is dropped.
    """

    def __init__(
        self, tool_format: ToolFormat, functions: Mapping[str, Schema | None], max_calls: int | None = None
    ) -> None:
        """``functions``: names, and the schemas of their parameters.

        After ``max_calls`` calls the parser is ``done`` and ignores further text.
        """
        self.markers = tool_format.markers
        self.calls = 0
        self.done = False
        self._format = tool_format
        # Splitting delimiters at every part of the output would take most of the time.
        self._triggers = tool_format.triggers
        self._functions = functions
        self._max_calls = max_calls
        self._text = CallText()
        # The held end of the text: white space, which is dropped if a call follows.
        self._space: list[str] = []
        # Units that may follow the last call.
        self._closings: list[str] = []
        # The call being read: its name, the JSON before its arguments are certain, whether its first part is released.
        self._name = ""
        self._announced = False
        # The JSON that was released of a call that is not written as JSON.
        self._written: list[str] = []
        self._parts: list[Part] = []
        self._reading = self._read()

    @property
    def held(self) -> str:
        """The end of the text, of which it is not decided whether it is text."""
        return "".join(self._space) + self._text.text

    def feed(self, text: str) -> list[Part]:
        """Read the next part of the output; return the parts that are decided now."""
        if text and not self.done:
            self._text.add(text)
            next(self._reading, None)
        return self._take_parts()

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return what was held back, at the end of the output.

        ``cut``: the model would have gone on. A call then lacks its end; otherwise, it is completed.
        """
        if not self.done:
            self._text.cut = cut
            self._text.ended = True
            next(self._reading, None)
            if not self.calls:
                self._add_text("".join(self._space))
            self.done = True
        return self._take_parts()

    def _take_parts(self) -> list[Part]:
        taken, self._parts = self._parts, []
        return taken

    def _read(self) -> Reading:
        if (self._format.unopened or self._format.prompted) and (yield from self._call(())):
            yield from self._more_calls()
        while not self.done:
            marker = yield from self._to_marker()
            if not marker:
                return
            if marker in self._closings:
                self._closings.remove(marker)
                self._text.drop(len(marker))
                self._text.at = 0
                continue
            expected = self._format.opening_units
            rest = expected[expected.index(marker) + 1 :] if marker in expected else ()
            self._text.at = len(marker)
            if (yield from self._call(rest)):
                yield from self._more_calls()
            elif self._text.at:
                # What follows the marker may still begin a call.
                self._pass(len(marker))

    def _to_marker(self) -> Generator[None, None, str]:
        """Release the text before the next marker, which then is at the start of what is held; "" at the end."""
        text = self._text
        while True:
            markers = (*self._closings, *self._triggers)
            found = [(at, -len(marker), marker) for marker in markers if (at := text.text.find(marker)) >= 0]
            at, _, marker = min(found, default=(len(text.text), 0, ""))
            longer = any(len(other) > len(text.text) - at and other.startswith(text.text[at:]) for other in markers)
            if marker and (text.ended or not longer):
                self._pass(at)
                return marker
            if not marker:
                held = 0 if text.ended else max((overlap(text.text, marker) for marker in markers), default=0)
                self._pass(len(text.text) - held)
            if text.ended:
                return ""
            yield

    def _pass(self, end: int) -> None:
        """Release the first ``end`` characters of what is held as text."""
        self._release(self._text.text[:end])
        self._text.drop(end)
        self._text.at = 0

    def _call(self, expected: tuple[str, ...]) -> Generator[None, None, bool]:
        """Read a call behind the units ``expected``, which may be missing; return whether it is one."""
        text = self._text
        self._announced = False
        for number, unit in enumerate(expected):
            yield from text.skip(SPACE + _LIST if unit[0] not in _LIST else SPACE)
            if unit is not HOLE and unit != HOLE:
                yield from text.accept(unit)
            elif not (yield from self._skip_id(expected[number + 1 : number + 2])):
                return False
        character = yield from text.skip(SPACE + _LIST)
        if character == "{" and {Style.OBJECT, Style.KEYED} & {*self._format.styles}:
            yield from self._object()
        elif character:
            yield from self._named()
        if self._announced:
            text.drop(text.at)
            text.at = 0
            self.done = self.calls == self._max_calls
            self._closings = [*self._format.closing_units]
        return self._announced

    def _skip_id(self, following: tuple[str, ...]) -> Generator[None, None, bool]:
        start = self._text.at
        while self._text.at - start <= _MAX_ID and (yield from self._text.peek()):
            for unit in following:
                if (yield from self._text.follows(unit)):
                    return True
            self._text.at += 1
        return False

    def _more_calls(self) -> Reading:
        """Read the calls that follow one without a marker of their own, and what closes them."""
        text, opening = self._text, units(self._format.opening.replace(NAME, HOLE))
        while not self.done:
            character = yield from text.skip()
            if not character:
                # Nothing but separators followed the last call.
                text.drop(len(text.text))
                return
            if (yield from self._accept_closing()):
                continue
            for marker in self._triggers:
                if (yield from text.follows(marker)):
                    text.at = 0
                    return
            if (yield from self._listed(character)):
                continue
            if not opening and character in _LIST:
                text.at += 1
            elif (opening and not (yield from text.follows(opening[0]))) or not (yield from self._call(opening)):
                text.at = 0
                return

    def _listed(self, character: str) -> Generator[None, None, bool]:
        """Read one more call between the tags around a call, or what ends a list of such calls."""
        text, closing = self._text, units(self._format.closing)
        inside = closing and closing[0] in self._closings and Style.OBJECT in self._format.styles
        if not inside or character not in _LIST + "{":
            return False
        text.at = 0
        following = yield from text.skip(SPACE + _LIST)
        if following == "{":
            found = yield from self._call(())
        else:
            found = not following
            for unit in self._closings:
                found = found or (yield from text.follows(unit))
        if found:
            return True
        text.at = 0
        yield from text.skip()
        return False

    def _accept_closing(self) -> Generator[None, None, bool]:
        text = self._text
        for closing in self._closings:
            if (yield from text.accept(closing)):
                self._closings.remove(closing)
                text.drop(text.at)
                text.at = 0
                return True
        return False

    def _object(self) -> Reading:
        if Style.KEYED in self._format.styles:
            start = self._text.at
            yield from self._keyed()
            if self._announced:
                return
            self._text.at = start
        if Style.OBJECT in self._format.styles:
            known = self._format
            yield from self._json(CallReader(name_key=known.name_key, arguments_key=known.arguments_key))

    def _keyed(self) -> Reading:
        text = self._text
        if not (yield from text.accept_units(("{", '"'))):
            return
        name = yield from text.run('"', _MAX_NAME)
        if name in self._functions and (yield from text.accept_units(('"', ":"))):
            yield from self._json(CallReader(name))
            yield from text.accept_units(("}",))

    def _json(self, reader: CallReader) -> Reading:
        text = self._text
        progress = Progress.MORE
        while progress is Progress.MORE and (character := (yield from text.peek())):
            text.at += 1
            ended = reader.arguments_end
            progress = reader.push(character)
            if reader.name is None or not reader.has_arguments or (ended and self._announced):
                # Keys behind the arguments are skipped, if they are read to their end.
                continue
            if not self._announced:
                if reader.name not in self._functions:
                    return
                self._name = reader.name
            self._emit(reader.take_arguments())
            text.drop(text.at)
            text.at = 0
        if self._announced and not reader.arguments_end:
            self._end_arguments(reader)
        elif self._announced and progress is not Progress.DONE:
            text.at = 0

    def _end_arguments(self, reader: CallReader) -> None:
        """End arguments that broke, or that the output does not end: what was released stays a valid call."""
        if self._text.cut:
            self._emit(reader.unread)
            return
        reader.complete()
        self._emit(reader.take_arguments())
        # What is no part of it is text.
        self._text.text = reader.unread + self._text.text[self._text.at :]
        self._text.at = 0

    def _named(self) -> Reading:
        """Read a call that begins with its name."""
        text, known = self._text, self._format
        name = yield from text.run(_NAME_ENDS, _MAX_NAME)
        if known.text_name and name == known.text_name and (yield from text.accept(known.name_closing)):
            text.drop(text.at)
            text.at = 0
            return
        name = name if name in self._functions else name.removeprefix(_NAMESPACE)
        if name not in self._functions:
            return
        self._name = name
        character = yield from text.peek()
        parameters = self._functions[name]
        if Style.PYTHON in known.styles and character == "(":
            text.at += 1
            # Text may begin like a call; arguments without a name would make one of it.
            properties = {} if known.unopened else resolved(parameters or {}, parameters).get("properties") or {}
            yield from self._written_by(LiteralReader(text, self._emit_late).arguments(")", "=", [*properties]))
        elif Style.BRACES in known.styles and character == "{":
            text.at += 1
            reader = LiteralReader(text, self._emit_late, known.quote)
            yield from self._written_by(reader.arguments("}", ":", ()))
        elif known.tags is not None:
            yield from self._tagged(parameters)
        elif Style.JSON in known.styles:
            yield from text.run('{}"', _MAX_HEADER)
            if (yield from text.peek()) == "{":
                yield from self._json(CallReader(name))

    def _tagged(self, parameters: Schema | None) -> Reading:
        known, text = self._format, self._text
        assert known.tags is not None
        for part in known.name_closing.split(HOLE):
            while known.name_closing.find(HOLE) >= 0 and (yield from text.peek()).isalnum():
                text.at += 1
            if not (yield from text.accept_units(units(part))):
                return
        reader = TagReader(text, self._emit_kept, known.tags, parameters)
        if (yield from reader.begins(known.closing_units)):
            yield from self._written_by(reader.arguments())

    def _written_by(self, reading: Generator[None, None, bool]) -> Reading:
        """Release the arguments that ``reading`` writes; what it does not come to the end of stays a valid call."""
        self._written = []
        complete = yield from reading
        if complete or not self._announced or self._text.cut:
            return
        mender, written = JsonMender(), "".join(self._written)
        for character in written:
            mender.push(character)
        mender.complete()
        self._emit(mender.take()[len(written) :])

    def _emit_late(self, arguments: str) -> None:
        """Release arguments, but not yet the brace that opens them: it may be followed by something else."""
        if not self._announced and arguments == "{":
            return
        self._emit_kept(arguments if self._announced else "{" + arguments)

    def _emit_kept(self, arguments: str) -> None:
        """Release arguments, and keep them until they end."""
        self._written.append(arguments)
        self._emit(arguments)

    def _emit(self, arguments: str) -> None:
        """Release a part of the arguments of the current call."""
        if not self._announced:
            self._announced = True
            self.calls += 1
            # White space before a call is not text.
            self._space = []
            self._parts.append(CallPart(self.calls - 1, self._name, arguments))
        elif arguments:
            last = self._parts[-1] if self._parts else None
            if isinstance(last, CallPart) and last.index == self.calls - 1:
                last.arguments += arguments
            else:
                self._parts.append(CallPart(self.calls - 1, None, arguments))

    def _release(self, text: str) -> None:
        """Add ``text`` to the parts without the white space at its end, which is dropped if a call follows."""
        shown = text.rstrip(SPACE)
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

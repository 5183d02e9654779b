"""Reads one tool call, a JSON object, a character at a time."""

from enum import Enum, auto

import msgspec

from caravan_dialects.chat.json_mender import SPACE, JsonMender, Progress, escaped, mended

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


class _State(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    STRING = auto()
    ARGUMENTS = auto()
    NESTED = auto()
    SCALAR = auto()
    AFTER = auto()


class CallReader:
    """Reads ``{"name": "f", "arguments": {…}}`` with its keys in any order; other keys are skipped.

    ``name`` is set once it has been read. The text of arguments that is taken is the beginning of a valid object. Each
    character is looked at once.
    """

    __slots__ = (
        "_arguments_keys",
        "_bare",
        "_depth",
        "_escaped",
        "_key",
        "_mender",
        "_name_keys",
        "_quoted",
        "_raw",
        "_reading_key",
        "_skipped",
        "_state",
        "_text",
        "name",
    )

    def __init__(self, name: str | None = None, *, name_key: str = _NAME, arguments_key: str = _ARGUMENTS[0]) -> None:
        """With ``name``, the object to read holds only the arguments of that function.

        ``name_key``, ``arguments_key``: keys of the object, besides the usual ones.
        """
        self.name = name
        self._bare = name is not None
        self._name_keys = (_NAME, name_key)
        self._arguments_keys = (*_ARGUMENTS, arguments_key)
        self._state = _State.VALUE if self._bare else _State.OBJECT
        self._key = "arguments" if self._bare else ""
        self._reading_key = False
        # Characters of the current key or value.
        self._raw: list[str] = []
        # What reads the arguments, if they are an object, and what is certain of them otherwise.
        self._mender: JsonMender | None = None
        self._text: str | None = None
        # Whether a key that is not known has had a list or an object.
        self._skipped = False
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def has_arguments(self) -> bool:
        """Whether ``take_arguments`` may be called: arguments of a known function have begun."""
        return self._mender is not None or self._text is not None

    @property
    def arguments_end(self) -> bool:
        """Whether all arguments have been read."""
        return self._text is not None or (self._mender is not None and self._mender.done)

    @property
    def unread(self) -> str:
        """The end of the arguments that is not taken, because it is not certain, or breaks them."""
        return "" if self._mender is None or self._state is not _State.ARGUMENTS else self._mender.unread

    def take_arguments(self) -> str:
        """Return the text of the arguments that was read since the last call."""
        if self._mender is not None:
            return self._mender.take()
        taken, self._text = self._text or "", ""
        return taken

    def complete(self) -> None:
        """End arguments that lack their end; `unread` is no part of them."""
        if self._mender is not None and not self._mender.done:
            self._mender.complete()

    def push(self, character: str) -> Progress:
        """Read one character. Do not call again after DONE or BROKEN."""
        match self._state:
            case _State.STRING:
                return self._string(character)
            case _State.ARGUMENTS:
                return self._argument(character)
            case _State.NESTED:
                return self._nested(character)
            case _State.SCALAR:
                return self._scalar(character)
            case _ if character in SPACE:
                return Progress.MORE
            case _State.VALUE:
                return self._begin_value(character)
            case _:
                return self._between(character)

    def _between(self, character: str) -> Progress:
        match self._state, character:
            case _State.OBJECT, "{":
                self._state = _State.KEY
            case _State.KEY, '"':
                self._reading_key = True
                self._begin_string()
            case _State.COLON, ":":
                self._state = _State.VALUE
            case _State.AFTER, ",":
                self._state = _State.KEY
            case ((_State.KEY | _State.AFTER), "}"):
                if self.name is not None and not self.has_arguments:
                    if self._skipped:
                        # Perhaps its arguments, under a key that is not known.
                        return Progress.BROKEN
                    self._text = "{}"
                return Progress.DONE
            case _:
                return Progress.BROKEN
        return Progress.MORE

    def _begin_string(self) -> None:
        self._state = _State.STRING
        self._raw = ['"']
        self._escaped = False

    def _begin_value(self, character: str) -> Progress:
        if character == '"':
            self._begin_string()
            return Progress.MORE
        if self._is_arguments and character == "{":
            self._mender = JsonMender()
            self._state = _State.ARGUMENTS
            return self._argument(character)
        self._raw = [character]
        if character in ",}]:" or (self._is_arguments and character == "["):
            return Progress.BROKEN
        self._state = _State.NESTED if character in "{[" else _State.SCALAR
        self._skipped = self._skipped or self._state is _State.NESTED
        self._depth, self._quoted, self._escaped = 1, False, False
        return Progress.MORE

    def _argument(self, character: str) -> Progress:
        assert self._mender is not None
        progress = self._mender.push(character)
        return self._end_value() if progress is Progress.DONE else progress

    @property
    def _is_arguments(self) -> bool:
        return self._key in self._arguments_keys and not self.has_arguments

    def _string(self, character: str) -> Progress:
        self._raw.append(escaped(character) if character < " " else character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            return self._end_string()
        return Progress.MORE

    def _end_string(self) -> Progress:
        raw = "".join(self._raw)
        if not self._reading_key and self._key not in self._name_keys and not self._is_arguments:
            return self._end_value()
        try:
            text = msgspec.json.decode(raw, type=str)
        except msgspec.DecodeError:
            return Progress.BROKEN
        if self._reading_key:
            self._reading_key = False
            self._key = text
            self._state = _State.COLON
            return Progress.MORE
        if self._key in self._name_keys:
            self.name = text if self.name is None else self.name
            return self._end_value()
        # Some models write the arguments as a string that contains JSON.
        self._text = mended(text) if text.strip() not in ("", "null") else "{}"
        return Progress.BROKEN if self._text is None else self._end_value()

    def _nested(self, character: str) -> Progress:
        self._raw.append(character)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                return self._end_value()
        return Progress.MORE

    def _scalar(self, character: str) -> Progress:
        if character not in SPACE and character not in ",}":
            self._raw.append(character)
            return Progress.MORE
        if self._is_arguments:
            if "".join(self._raw) not in ("null", "None"):
                return Progress.BROKEN
            self._text = "{}"
        progress = self._end_value()
        return progress if progress is Progress.DONE or character in SPACE else self._between(character)

    def _end_value(self) -> Progress:
        if self._bare:
            return Progress.DONE
        self._state = _State.AFTER
        return Progress.MORE

"""Reads one tool call, a JSON object, a character at a time."""

from enum import Enum, auto

import msgspec

_SPACE = frozenset(" \n\r\t")
_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


class Progress(Enum):
    MORE = auto()
    DONE = auto()
    BROKEN = auto()


class _State(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    STRING = auto()
    NESTED = auto()
    SCALAR = auto()
    AFTER = auto()


class CallReader:
    """Reads ``{"name": "f", "arguments": {…}}`` with its keys in any order; other keys are skipped.

    ``name`` is set once it has been read. Arguments are passed on unchecked: a model may write invalid JSON, and the
    client has to see it. Each character is looked at once.
    """

    __slots__ = (
        "_arguments",
        "_arguments_keys",
        "_bare",
        "_depth",
        "_escaped",
        "_key",
        "_name_keys",
        "_quoted",
        "_raw",
        "_reading_key",
        "_state",
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
        self._arguments: list[str] | None = None
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def has_arguments(self) -> bool:
        """Whether ``take_arguments`` may be called: arguments of a known function have begun."""
        return self._arguments is not None

    def take_arguments(self) -> str:
        """Return the text of the arguments that was read since the last call."""
        assert self._arguments is not None
        taken = "".join(self._arguments)
        # Cleared in place, because ``_nested`` appends to the same list as ``_raw``.
        self._arguments.clear()
        return taken

    def push(self, character: str) -> Progress:
        """Read one character. Do not call again after DONE or BROKEN."""
        match self._state:
            case _State.STRING:
                return self._string(character)
            case _State.NESTED:
                return self._nested(character)
            case _State.SCALAR:
                return self._scalar(character)
            case _ if character in _SPACE:
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
                if self.name is not None and self._arguments is None:
                    self._arguments = ["{}"]
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
        self._raw = [character]
        if character in "{[":
            self._state = _State.NESTED
            self._depth, self._quoted, self._escaped = 1, False, False
            if self._is_arguments and self.name is not None:
                # Every further character of this value is part of the arguments at once.
                self._arguments = self._raw
            return Progress.MORE
        if character in ",}]:":
            return Progress.BROKEN
        self._state = _State.SCALAR
        return Progress.MORE

    @property
    def _is_arguments(self) -> bool:
        return self._key in self._arguments_keys and self._arguments is None

    def _string(self, character: str) -> Progress:
        self._raw.append(character)
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
        self._arguments = [text]
        return self._end_value()

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
                if self._is_arguments:
                    self._arguments = self._raw
                return self._end_value()
        return Progress.MORE

    def _scalar(self, character: str) -> Progress:
        if character not in _SPACE and character not in ",}":
            self._raw.append(character)
            return Progress.MORE
        if self._is_arguments:
            raw = "".join(self._raw)
            self._arguments = ["{}" if raw == "null" else raw]
        progress = self._end_value()
        return progress if progress is Progress.DONE or character in _SPACE else self._between(character)

    def _end_value(self) -> Progress:
        if self._bare:
            return Progress.DONE
        self._state = _State.AFTER
        return Progress.MORE

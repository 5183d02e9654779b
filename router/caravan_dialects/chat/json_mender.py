"""Reads an object of JSON that a model wrote, a character at a time, and mends what models usually do wrong in it.

In strings, raw control characters, stray backslashes and quotes are escaped. Commas before a closing bracket are
dropped, and Python's words and quotes become JSON's. What comes out is always the beginning of valid JSON.
"""

from enum import Enum, auto

import msgspec


class Progress(Enum):
    MORE = auto()
    DONE = auto()
    BROKEN = auto()


class _State(Enum):
    VALUE = auto()
    # Behind a bracket that opens an object or a list.
    FIRST = auto()
    # Behind a comma, which is not taken before something follows it.
    COMMA = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    CODE = auto()
    # Behind a quote that may end a string.
    QUOTE = auto()
    WORD = auto()
    DONE = auto()


SPACE = frozenset(" \n\r\t")
_STRINGS = frozenset({_State.STRING, _State.ESCAPE, _State.CODE, _State.QUOTE})
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_CODE_LENGTH = len("\\u0000")
_HIGH, _LOW = "89abAB", "cdefCDEF"
_LONE = "\\ufffd"
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORD_ENDS = frozenset(",]}:[{\"'<") | SPACE
_MAX_WORD = 1024
_MAX_OPEN = 4096
# Behind a quote, these show that it ended a string. Tags behind calls begin with the last ones.
_AFTER_STRING = frozenset(',]}"{<[\ufdd4')
_CLOSINGS = {"{": "}", "[": "]"}


class JsonMender:
    """``take`` returns what is certain of the object; ``unread`` is what is not yet, or breaks it."""

    __slots__ = ("_high", "_in_key", "_open", "_out", "_quote", "_state", "unread")

    def __init__(self) -> None:
        self.unread = ""
        self._state = _State.VALUE
        # The brackets that are open, the quote of the string that is read, and whether it is a key.
        self._open: list[str] = []
        self._quote = '"'
        self._in_key = False
        # The first of two codes that are one character.
        self._high = ""
        self._out: list[str] = []

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._state is _State.DONE

    def take(self) -> str:
        """Return what has been read since the last call."""
        taken = "".join(self._out)
        self._out.clear()
        return taken

    def push(self, character: str) -> Progress:
        """Read one character. Do not call again after DONE or BROKEN."""
        match self._state:
            case _State.STRING:
                self._string(character)
            case _State.ESCAPE:
                self._escape(character)
            case _State.CODE:
                self._code(character)
            case _State.QUOTE:
                return self._behind_quote(character)
            case _State.WORD:
                return self._word(character)
            case _:
                return self._between(character)
        return Progress.MORE

    def complete(self) -> None:
        """End the object here: what is missing is added, and what can be read at its end is."""
        state, held = self._state, self.unread
        match state:
            case _State.WORD if (word := _decoded(held)) is not None:
                self._add(word)
            case _State.WORD | _State.VALUE if self._open:
                self._out.append("null")
            case _State.ESCAPE | _State.CODE:
                self._end_code()
                self._add(f"\\\\{held[1:]}")
            case _State.QUOTE | _State.COMMA:
                self.unread = ""
            case _:
                pass
        if state in _STRINGS:
            self._end_code()
            self._out.append('"')
        if state is _State.COLON or (state in _STRINGS and self._in_key):
            self._out.append(": null")
        self._out += [_CLOSINGS[bracket] for bracket in reversed(self._open)]
        self._state = _State.DONE

    def _add(self, text: str) -> None:
        self._out.append(text)
        self.unread = ""

    def _broken(self, character: str, state: _State) -> Progress:
        self.unread += character
        self._state = state
        return Progress.BROKEN

    def _between(self, character: str) -> Progress:
        inside = self._open[-1] if self._open else ""
        if character in SPACE:
            if self._state is _State.COMMA:
                self.unread += character
            elif inside:
                self._out.append(character)
            return Progress.MORE
        match self._state:
            case _State.COLON if character == ":":
                self._out.append(character)
                self._state = _State.VALUE
                return Progress.MORE
            case _State.AFTER if character == ",":
                self.unread = character
                self._state = _State.COMMA
                return Progress.MORE
            case _State.FIRST | _State.COMMA | _State.AFTER if inside and character == _CLOSINGS[inside]:
                return self._close(character)
            case _State.FIRST | _State.COMMA if inside == "{":
                return self._key(character)
            case _State.VALUE | _State.FIRST | _State.COMMA:
                return self._value(character)
            case state:
                return self._broken(character, state)

    def _close(self, character: str) -> Progress:
        self._open.pop()
        self._add(character)
        self._state = _State.AFTER if self._open else _State.DONE
        return Progress.MORE if self._open else Progress.DONE

    def _key(self, character: str) -> Progress:
        if character not in "\"'":
            return self._broken(character, _State.AFTER)
        self._add(self.unread)
        self._begin_string(character)
        self._in_key = True
        return Progress.MORE

    def _value(self, character: str) -> Progress:
        if (not self._open and character != "{") or character in ",:]}" or len(self._open) >= _MAX_OPEN:
            return self._broken(character, _State.AFTER if self._state is _State.COMMA else self._state)
        self._add(self.unread)
        if character in "\"'":
            self._begin_string(character)
            self._in_key = False
        elif character in _CLOSINGS:
            self._open.append(character)
            self._out.append(character)
            self._state = _State.FIRST
        else:
            self.unread = character
            self._state = _State.WORD
        return Progress.MORE

    def _begin_string(self, quote: str) -> None:
        self._out.append('"')
        self._quote = quote
        self._state = _State.STRING

    def _string(self, character: str) -> None:
        if character == "\\":
            self.unread = character
            self._state = _State.ESCAPE
            return
        self._end_code()
        if character == self._quote and self._in_key:
            self._out.append('"')
            self._state = _State.COLON
        elif character == self._quote:
            self.unread = character
            self._state = _State.QUOTE
        else:
            self._out.append(escaped(character))

    def _escape(self, character: str) -> None:
        self._state = _State.STRING
        if character == "u":
            self.unread += character
            self._state = _State.CODE
            return
        self._end_code()
        if character in _ESCAPES:
            self._add(f"\\{character}")
        elif character == "'":
            self._add(character)
        else:
            self._add("\\\\")
            self._string(character)

    def _code(self, character: str) -> None:
        if character not in _HEX:
            self._end_code()
            self._add(f"\\\\{self.unread[1:]}")
            self._state = _State.STRING
            self._string(character)
            return
        self.unread += character
        if len(self.unread) < _CODE_LENGTH:
            return
        code, self.unread = self.unread, ""
        self._state = _State.STRING
        surrogate = code[2] in "dD"
        if surrogate and code[3] in _LOW:
            self._out.append(self._high + code if self._high else _LONE)
            self._high = ""
            return
        self._end_code()
        if surrogate and code[3] in _HIGH:
            self._high = code
        else:
            self._out.append(code)

    def _end_code(self) -> None:
        if self._high:
            self._out.append(_LONE)
            self._high = ""

    def _behind_quote(self, character: str) -> Progress:
        if character in SPACE:
            self.unread += character
            return Progress.MORE
        space = self.unread[1:]
        if character in _AFTER_STRING:
            self._add('"' + space)
            self._state = _State.AFTER
            return self._between(character)
        # The quote is a part of the string: models do not escape all of them.
        self._add(escaped(self._quote))
        self._state = _State.STRING
        for inner in space + character:
            self.push(inner)
        return Progress.MORE

    def _word(self, character: str) -> Progress:
        if character not in _WORD_ENDS and len(self.unread) < _MAX_WORD:
            self.unread += character
            return Progress.MORE
        if (word := _decoded(self.unread)) is None:
            return self._broken(character, _State.VALUE)
        self._add(word)
        self._state = _State.AFTER
        return self._between(character)


def escaped(character: str) -> str:
    """Return ``character`` as a part of a string in JSON."""
    return msgspec.json.encode(character).decode()[1:-1] if character < " " or character in '"\\' else character


def mended(text: str) -> str | None:
    """Return ``text``, an object, as valid JSON; None if it is none, or if more follows."""
    mender = JsonMender()
    for at, character in enumerate(text):
        match mender.push(character):
            case Progress.DONE:
                return mender.take() if not text[at + 1 :].strip() else None
            case Progress.BROKEN:
                return None
            case Progress.MORE:
                pass
    return None


def _decoded(word: str) -> str | None:
    word = _WORDS.get(word, word)
    try:
        value = msgspec.json.decode(word)
    except msgspec.DecodeError:
        return None
    return word if value is None or isinstance(value, int | float) else None

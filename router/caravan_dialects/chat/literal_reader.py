"""Reads arguments written as literals, Python's or Gemma's, and writes them as JSON while they arrive."""

from collections.abc import Callable, Generator, Sequence

import msgspec

from caravan_dialects.chat.call_text import CallText, json_text, overlap

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_HIGHEST = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
# What may follow a string: a quote before anything else is a character of it, as models do not escape all.
_AFTER_STRING = ",)]}:"
_WORD_ENDS = " \n\r\t,)]}:"
_MAX_WORD = 64
_MAX_DIGITS = 1024
MAX_DEPTH = 64


class LiteralReader:
    """Reads from ``text``; ``emit`` takes the JSON. ``quote``: the delimiter of strings; "" for Python's.

    The generators return whether they could read what they found.
    """

    __slots__ = ("_before", "_quote", "_release", "_text")

    def __init__(self, text: CallText, emit: Callable[[str], None], quote: str = "") -> None:
        self._text = text
        self._release = emit
        self._quote = quote
        # What precedes the next value, if that can be read.
        self._before = ""

    def _emit(self, json: str) -> None:
        self._release(self._before + json)
        self._before = ""

    def arguments(self, closing: str, assigns: str, names: Sequence[str]) -> Generator[None, None, bool]:
        """Read ``key=value, …`` up to and including ``closing``; ``assigns`` is the character behind a key.

        Values without a key belong to the parameters ``names``, in their order.
        """
        self._emit("{")
        for number in range(1 << 16):
            if (yield from self._text.skip(" \n\r\t,")) == closing:
                self._text.at += 1
                self._emit("}")
                return True
            start = self._text.at
            key = yield from self._key(assigns)
            if key is None:
                if number >= len(names):
                    return False
                key = names[number]
            self._before = f"{', ' if number else ''}{json_text(key)}: "
            if not (yield from self._value(MAX_DEPTH)):
                self._text.at = start if self._before else self._text.at
                return False
        return False

    def _key(self, assigns: str) -> Generator[None, None, str | None]:
        start = self._text.at
        if self._quote and (yield from self._text.accept(self._quote)):
            end = yield from self._find(self._quote)
            key = self._text.text[start + len(self._quote) : end]
            self._text.at = end + len(self._quote)
        else:
            key = (yield from self._text.run(assigns + ",()[]{}'\" \n\t", _MAX_WORD)).strip()
        if key and (yield from self._text.skip()) == assigns:
            self._text.at += 1
            return key
        self._text.at = start
        return None

    def _value(self, depth: int) -> Generator[None, None, bool]:
        character = yield from self._text.skip()
        if not character or not depth:
            return False
        if self._quote and (yield from self._text.accept(self._quote)):
            return (yield from self._raw_string())
        if not self._quote and character in "'\"":
            self._text.at += 1
            return (yield from self._string(character))
        if character in "[(":
            self._text.at += 1
            return (yield from self._items("]" if character == "[" else ")", depth))
        if character == "{":
            self._text.at += 1
            return (yield from self._pairs(depth))
        start = self._text.at
        word = yield from self._text.run(_WORD_ENDS, _MAX_DIGITS)
        if word not in _WORDS and not _is_number(word):
            self._text.at = start
            return False
        self._emit(_WORDS.get(word) or _number(word))
        return True

    def _items(self, closing: str, depth: int) -> Generator[None, None, bool]:
        self._emit("[")
        first = True
        while (character := (yield from self._text.skip(" \n\r\t,"))) != closing:
            if not character:
                return False
            self._before = "" if first else ", "
            first = False
            if not (yield from self._value(depth - 1)):
                return False
        self._text.at += 1
        self._emit("]")
        return True

    def _pairs(self, depth: int) -> Generator[None, None, bool]:
        self._emit("{")
        first = True
        while (character := (yield from self._text.skip(" \n\r\t,"))) != "}":
            if not character:
                return False
            start = self._text.at
            self._before = "" if first else ", "
            first = False
            if character in "'\"" and not self._quote:
                self._text.at += 1
                if not (yield from self._string(character)) or (yield from self._text.skip()) != ":":
                    return False
                self._text.at += 1
                self._before = ": "
            else:
                key = yield from self._key(":")
                if key is None:
                    return False
                self._before += json_text(key) + ": "
            if not (yield from self._value(depth - 1)):
                self._text.at = start if self._before else self._text.at
                return False
        self._text.at += 1
        self._emit("}")
        return True

    def _raw_string(self) -> Generator[None, None, bool]:
        """Read a string without escapes, up to and including the quote."""
        text, quote = self._text, self._quote
        self._emit('"')
        while (end := text.text.find(quote, text.at)) < 0:
            safe = len(text.text) - overlap(text.text, quote, text.at)
            self._emit(json_text(text.text[text.at : safe])[1:-1])
            text.at = safe
            if text.ended:
                return False
            yield
        self._emit(json_text(text.text[text.at : end])[1:-1] + '"')
        text.at = end + len(quote)
        return True

    def _string(self, quote: str) -> Generator[None, None, bool]:
        text = self._text
        self._emit('"')
        while character := (yield from text.peek()):
            text.at += 1
            if character == "\\":
                character = yield from self._escaped()
            elif character == quote and (yield from self._closes()):
                self._emit('"')
                return True
            self._emit(json_text(character)[1:-1])
        return False

    def _closes(self) -> Generator[None, None, bool]:
        text, start = self._text, self._text.at
        following = yield from text.skip()
        text.at = start
        return not following or following in _AFTER_STRING

    def _escaped(self) -> Generator[None, None, str]:
        character = yield from self._text.peek()
        if character in _CODES:
            start = self._text.at + 1
            length = _CODES[character]
            while len(self._text.text) < start + length and not self._text.ended:
                yield
            digits = self._text.text[start : start + length]
            if len(digits) == length and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                code = int(digits, 16)
                if code <= _HIGHEST:
                    self._text.at = start + length
                    return (yield from self._joined(code)) if code in _SURROGATES else chr(code)
        if character in _ESCAPES:
            self._text.at += 1
            return _ESCAPES[character]
        if character and character in "'\"\\":
            self._text.at += 1
            return character
        # Python keeps the backslash before any other character.
        return "\\"

    def _joined(self, high: int) -> Generator[None, None, str]:
        """Return the character of two surrogates, as JSON's strings have them, the first of which was read."""
        text, length = self._text, len("\\uDC00")
        if (yield from text.follows("\\u")):
            while len(text.text) < text.at + length and not text.ended:
                yield
            pair = high.to_bytes(2, "big").hex() + text.text[text.at + 2 : text.at + length]
            try:
                character = bytes.fromhex(pair).decode("utf-16-be")
            except ValueError:
                return "\ufffd"
            text.at += length
            return character
        return "\ufffd"

    def _find(self, expected: str) -> Generator[None, None, int]:
        """Return the position of ``expected``; that of the end if it does not come."""
        while (at := self._text.text.find(expected, self._text.at)) < 0:
            if self._text.ended:
                return len(self._text.text)
            yield
        return at


def _is_number(word: str) -> bool:
    try:
        value = msgspec.json.decode(_number(word))
    except msgspec.DecodeError:
        return False
    return isinstance(value, int | float)


def _number(word: str) -> str:
    """Return a number as JSON writes it."""
    word = word.removeprefix("+").replace("_", "")
    word = word + "0" if word.endswith(".") else word
    sign, digits = ("-", word[1:]) if word.startswith("-") else ("", word)
    return f"{sign}0{digits}" if digits.startswith(".") else word

"""Decodes a request's body into its type, and bounds before how much memory its values take."""

import re
from typing import Any, TypeVar

import msgspec

from caravan_dialects.api.errors import BodyMismatchError, MalformedBodyError

# Bytes that values take beside their text, at most, in CPython: a dict or a struct with its first entries, a list with
# its first ones, an entry of a dict, an entry of a list with a number, the head of a string.
_OBJECT, _LIST, _ENTRY, _ITEM, _STRING = 256, 128, 100, 48, 64
# A body that cannot take more is not looked at closely.
_LITTLE_BYTES = 1 << 20
# Strings are looked at one by one if there are no more.
_MOST_STRINGS = 20_000
# Every character of a string takes as many bytes as its widest one.
_WIDEST = 4
_WIDE_MARKS = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4", b"\\ud", b"\\uD")
T = TypeVar("T")
_REASON_CHARACTERS = 300
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_PATH = re.compile(r" at `\$\.([^`]*)`$")


def most_decoded_bytes(body: bytes | bytearray) -> int:
    """Return the most bytes that the values of ``body`` take once it is decoded. Takes time linear in its length."""
    if (most := _of_marks(body) + _of_strings(body) + len(body) * _WIDEST) <= _LITTLE_BYTES:
        return most
    # An escape stands for one character, so one byte in its place makes no string shorter than it is.
    text = body.replace(b"\\\\", b"x").replace(b'\\"', b"x")
    if text.count(b'"') > 2 * _MOST_STRINGS:
        return _of_marks(text) + _of_strings(text) + len(text) * _width_of(text)
    outside_and_inside = text.split(b'"')
    outside, strings = outside_and_inside[::2], outside_and_inside[1::2]
    return sum(map(_of_marks, outside)) + sum(_STRING + len(string) * _width_of(string) for string in strings)


def _of_marks(text: bytes | bytearray) -> int:
    """Return the bytes of all values whose marks are in ``text``, without those of strings."""
    return text.count(b"{") * _OBJECT + text.count(b"[") * _LIST + text.count(b":") * _ENTRY + text.count(b",") * _ITEM


def _of_strings(text: bytes | bytearray) -> int:
    return text.count(b'"') * _STRING // 2


def _width_of(text: bytes | bytearray) -> int:
    """Return how many bytes a character of ``text`` takes at most, in Python's memory."""
    if text.isascii() and b"\\u" not in text:
        return 1
    return _WIDEST if any(mark in text for mark in _WIDE_MARKS) else 2


def decode(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], inside: str = "") -> T:
    """Decode a body, or the part of it that is ``inside`` a field. Raises MalformedBodyError, BodyMismatchError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise mismatch(error, inside) from error
    except msgspec.DecodeError as error:
        raise MalformedBodyError(str(error)) from error
    except UnicodeDecodeError as error:
        raise MalformedBodyError("a string is not valid UTF-8") from error
    except RecursionError as error:
        raise MalformedBodyError("it is nested too deeply") from error


def mismatch(error: msgspec.ValidationError, inside: str) -> BodyMismatchError:
    """Return the error of a body that has not its type, or of the part of it that is ``inside`` a field."""
    # The message quotes the client's own names and values, which may have any length.
    reason = _placed(str(error)[:_REASON_CHARACTERS], inside)
    return BodyMismatchError(_field_of(reason), reason)


def _placed(reason: str, inside: str) -> str:
    if not inside:
        return reason
    return reason.replace("at `$", f"at `$.{inside}", 1) if "at `$" in reason else f"{reason} - at `$.{inside}`"


def _field_of(message: str) -> str:
    path, unknown = _PATH.search(message), _UNKNOWN_FIELD.search(message)
    return ".".join(found[1] for found in (path, unknown) if found)


def object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that the arguments of a call, ``text``, are; None if they are none, as when cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None

"""The lines of the audit log. Each has the hash of the line before it and its own, so that no change goes unnoticed.

A line is a JSON object whose last field, ``hash``, is the SHA-256 of all bytes before that field; ``prev`` is the hash
of the line before, and ``line`` counts from 1.
"""

import hashlib
from dataclasses import dataclass

import msgspec

_FIELD, _END = b',"hash":"', b'"}\n'
_HASH_CHARACTERS = 64
# Where the field of the hash begins, from the end of a line.
_TAIL = len(_FIELD) + _HASH_CHARACTERS + len(_END)


@dataclass(frozen=True, slots=True)
class Head:
    """The last line of a log: its number, and its hash in hexadecimal."""

    line: int = 0
    hash: str = "0" * _HASH_CHARACTERS


START = Head()


class BrokenChainError(Exception):
    """A line is not the one that was written after the line before it."""


class _Link(msgspec.Struct):
    line: int
    prev: str


def next_line(head: Head, fields: dict[str, object]) -> tuple[bytes, Head]:
    """Return the line with ``fields`` that follows ``head``, and the new head."""
    number = head.line + 1
    begin = msgspec.json.encode({"line": number, **fields, "prev": head.hash})[:-1]
    digest = hashlib.sha256(begin).hexdigest()
    return begin + _FIELD + digest.encode() + _END, Head(number, digest)


def ends_of(line: bytes) -> tuple[Head, Head] | None:
    """Return the head before and after a whole line by what it says, true or not; None if it is no line of a log."""
    if len(line) <= _TAIL or line[-_TAIL : -_TAIL + len(_FIELD)] != _FIELD or not line.endswith(_END):
        return None
    try:
        link = msgspec.json.decode(line, type=_Link)
        digest = line[-len(_END) - _HASH_CHARACTERS : -len(_END)].decode("ascii")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Head(link.line - 1, link.prev), Head(link.line, digest)


def checked(line: bytes, head: Head) -> Head:
    """Return the head after ``line``, which must follow ``head``. Raises BrokenChainError."""
    where = f"line {head.line + 1}"
    ends = ends_of(line)
    if ends is None:
        raise BrokenChainError(f"{where} is no line of an audit log, or is cut off")
    before, after = ends
    if hashlib.sha256(line[:-_TAIL]).hexdigest() != after.hash:
        raise BrokenChainError(f"{where} was changed: its hash is another one")
    if before != head:
        raise BrokenChainError(f"{where} does not follow the line before it. It says that it is line {after.line}")
    return after

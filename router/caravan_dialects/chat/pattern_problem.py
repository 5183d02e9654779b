"""Finds the errors in regular expressions that llguidance does not: it drops a backslash at the end, for one."""

import re
from enum import Enum, auto

_COUNT = re.compile(r"\{\d+(?:,\d*)?\}")
# Classes may have classes within.
_CLASS = re.compile(r"\[\^?\]?")


class _Before(Enum):
    """What precedes a place in an expression."""

    NOTHING = auto()
    ANCHOR = auto()
    ATOM = auto()
    REPEATED = auto()
    LAZY = auto()


def ends_in_escape(pattern: str) -> bool:
    """Whether ``pattern`` ends with a backslash that escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def pattern_problem(pattern: str) -> str | None:
    """Return what is wrong with ``pattern`` in ECMA 262, as far as this module looks, or None."""
    if ends_in_escape(pattern):
        return "the regular expression ends with a backslash that escapes nothing"
    at, before = 0, _Before.NOTHING
    while at < len(pattern):
        character = pattern[at]
        count = _COUNT.match(pattern, at)
        if character in "*+?" or count is not None:
            if before is _Before.REPEATED and character == "?":
                before = _Before.LAZY
            elif before is _Before.ATOM:
                before = _Before.REPEATED
            else:
                return f"the regular expression has nothing to repeat at {at}"
            at = at + 1 if count is None else count.end()
            continue
        before = _Before.ATOM
        match character:
            case "\\":
                at += 2
            case "[":
                at = _behind_class(pattern, at)
            case "(":
                before = _Before.NOTHING
                at += 2 if pattern.startswith("(?", at) else 1
            case "|":
                before = _Before.NOTHING
                at += 1
            case "^" | "$":
                before = _Before.ANCHOR
                at += 1
            case _:
                at += 1
    return None


def _behind_class(pattern: str, at: int) -> int:
    depth = 0
    while at < len(pattern):
        opening = _CLASS.match(pattern, at)
        if opening is not None:
            depth += 1
            at = opening.end()
        elif pattern[at] == "\\":
            at += 2
        else:
            depth -= int(pattern[at] == "]")
            at += 1
            if not depth:
                break
    return at

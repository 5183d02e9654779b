"""The names and the number of properties in schemas, as a grammar can enforce them.

A pattern that matches few names is written as these: llguidance does not enforce patterns well.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from caravan_dialects.chat.schema_references import Path, UnsupportedSchemaError

# What stands for itself behind a backslash.
_PLAIN_ESCAPES = frozenset("^$\\.*+?()[]{}|/-_#&~ ")
_META = frozenset("^$\\.*+?()[]{}|")
_COUNT = re.compile(r"\{(\d{1,3})(?:,(\d{1,3}))?\}")
_DIGITS = "0123456789"
Json = dict[str, Any]
# A pattern that matches no more names is written as these.
_MOST_NAMES = 64
_LENGTHS = frozenset({"minLength", "maxLength"})
_COUNTS = frozenset({"minProperties", "maxProperties"})


class _UnknownError(Exception):
    """The pattern has what this module does not read, or matches too many texts."""


def finite_texts(pattern: str, most: int) -> frozenset[str] | None:
    """Return all texts in which ``pattern`` is found; None if they may be more than ``most``.

    It reads literals, classes, groups, alternatives and small counts between anchors, and returns None for the rest.
    """
    try:
        reader = _Reader(pattern, most)
        found = reader.whole()
    except (_UnknownError, RecursionError):
        return None
    return found


class _Reader:
    def __init__(self, pattern: str, most: int) -> None:
        self._pattern = pattern
        self._at = 0
        self._most = most

    def whole(self) -> frozenset[str]:
        """Read alternatives with an anchor at both ends: without one, any text may precede or follow."""
        found = frozenset[str]()
        while True:
            self._expect("^")
            found = self._limited(found | self._sequence())
            self._expect("$")
            if self._at == len(self._pattern):
                return found
            self._expect("|")

    def _alternatives(self) -> frozenset[str]:
        found = self._sequence()
        while self._takes("|"):
            found = self._limited(found | self._sequence())
        return found

    def _sequence(self) -> frozenset[str]:
        found = frozenset({""})
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)$":
            found = self._product(found, self._counted(self._atom()))
        return found

    def _counted(self, texts: frozenset[str]) -> frozenset[str]:
        least, most = 1, 1
        if self._takes("?"):
            least = 0
        elif count := _COUNT.match(self._pattern, self._at):
            self._at = count.end()
            least = int(count[1])
            most = int(count[2] or least)
        # A lazy count matches the same texts.
        self._takes("?")
        if self._at < len(self._pattern) and self._pattern[self._at] in "*+?{":
            raise _UnknownError
        return frozenset[str]().union(*self._repeated(texts, least, most))

    def _repeated(self, texts: frozenset[str], least: int, most: int) -> Iterator[frozenset[str]]:
        found = frozenset({""})
        for count in range(most + 1):
            if count >= least:
                yield found
            if count < most:
                found = self._product(found, texts)

    def _atom(self) -> frozenset[str]:
        character = self._next()
        if character == "(":
            if self._takes("?"):
                self._expect(":")
            found = self._alternatives()
            self._expect(")")
            return found
        if character == "[":
            return self._class()
        if character == "\\":
            return self._escaped()
        if character in _META:
            raise _UnknownError
        return frozenset({character})

    def _class(self) -> frozenset[str]:
        found = set[str]()
        # Dialects differ in what a bracket means here.
        if self._takes("]"):
            raise _UnknownError
        while not self._takes("]"):
            character = self._next()
            if character in "^[&~" or (character == "-" and found):
                raise _UnknownError
            first = self._escaped() if character == "\\" else frozenset({character})
            if self._pattern[self._at : self._at + 1] == "-" and self._pattern[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._next()
                if last in "\\[" or len(first) > 1:
                    raise _UnknownError
                start = ord(min(first))
                if ord(last) - start >= self._most:
                    raise _UnknownError
                first = frozenset(map(chr, range(start, ord(last) + 1)))
            found |= first
        return self._limited(frozenset(found))

    def _escaped(self) -> frozenset[str]:
        character = self._next()
        if character == "d":
            return frozenset(_DIGITS)
        if character not in _PLAIN_ESCAPES:
            raise _UnknownError
        return frozenset({character})

    def _product(self, firsts: frozenset[str], seconds: frozenset[str]) -> frozenset[str]:
        if len(firsts) * len(seconds) > self._most:
            raise _UnknownError
        return frozenset(first + second for first in firsts for second in seconds)

    def _limited(self, texts: frozenset[str]) -> frozenset[str]:
        if len(texts) > self._most:
            raise _UnknownError
        return texts

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise _UnknownError
        self._at += 1
        return self._pattern[self._at - 1]

    def _takes(self, character: str) -> bool:
        found = self._pattern[self._at : self._at + 1] == character
        self._at += int(found)
        return found

    def _expect(self, character: str) -> None:
        if not self._takes(character):
            raise _UnknownError


def with_allowed_names(plain: Json, names: Json | bool, path: Path) -> Json:
    """Return ``plain`` such that all names of properties match the schema ``names``.

    Both are in the form of `plain_schema`. Raises UnsupportedSchemaError.
    """
    if isinstance(names, bool):
        names = {} if names else {"enum": []}
    rules = names.keys() - {"type"}
    kinds = names.get("type", "string")
    if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
        allowed: Iterable[Any] | None = ()
    elif not rules:
        return plain
    elif rules == {"const"}:
        allowed = (names["const"],)
    elif rules == {"enum"} and isinstance(names["enum"], list):
        allowed = names["enum"]
    else:
        allowed = finite_texts(names["pattern"], _MOST_NAMES) if rules == {"pattern"} else None
    if allowed is not None and "patternProperties" not in plain:
        return _only(plain, dict.fromkeys(name for name in allowed if isinstance(name, str)))
    if plain.keys() & {"properties", "patternProperties"} or not (rules == {"pattern"} or rules <= _LENGTHS):
        raise UnsupportedSchemaError("it cannot be enforced", (*path, "propertyNames"))
    pattern = names.get("pattern", f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$")
    return {
        **plain,
        "patternProperties": {pattern: plain.get("additionalProperties", {})},
        "additionalProperties": False,
    }


def _only(plain: Json, names: Mapping[str, None]) -> Json:
    known = plain.get("properties", {})
    properties = {name: schema for name, schema in known.items() if name in names}
    others = {name: plain.get("additionalProperties", {}) for name in names if name not in known}
    return {**plain, "properties": properties | others, "additionalProperties": False}


def with_listed_names(plain: Json, path: Path) -> Json:
    """Return ``plain`` with properties in place of patterns that match few names.

    llguidance lets a name that matches a pattern occur twice, and has a dead end where all such names are taken.
    """
    patterns = plain.get("patternProperties", {})
    if len(patterns) > _MOST_NAMES:
        return plain
    found = {pattern: finite_texts(pattern, _MOST_NAMES) for pattern in patterns}
    listed = {pattern: names for pattern, names in found.items() if names is not None}
    known = plain.get("properties", {})
    plain = _with_counts(plain, None if len(listed) < len(found) else {*known}.union(*listed.values()), path)
    properties = dict(known)
    for pattern, names in listed.items():
        # llguidance counts properties only if all that are named are required.
        if not _COUNTS & plain.keys() or names <= known.keys():
            for name in sorted(names):
                properties[name] = _both(properties.get(name, {}), patterns[pattern])
            patterns = {other: schema for other, schema in patterns.items() if other != pattern}
    if patterns == plain.get("patternProperties", {}):
        return plain
    rest = {"patternProperties": patterns} if patterns else {}
    others = {key: value for key, value in plain.items() if key != "patternProperties"}
    return {**others, "properties": properties, **rest}


def _with_counts(plain: Json, names: set[str] | None, path: Path) -> Json:
    """Leave out bounds that always hold. ``names``: of all properties there may be; None if they are not known."""
    required = {*plain.get("required", ())}
    left = dict(plain)
    if left.get("minProperties", 0) <= len(required):
        left.pop("minProperties", None)
    if names is None or plain.get("additionalProperties") is not False:
        return left
    if left.get("minProperties", 0) > len(names):
        raise UnsupportedSchemaError(f"there are only {len(names)} properties", (*path, "minProperties"))
    if left.get("minProperties") == len(names):
        del left["minProperties"]
        left["required"] = sorted(required | names)
    if left.get("maxProperties", 0) >= len(names):
        left.pop("maxProperties", None)
    return left


def _both(one: Any, other: Any) -> Any:
    if one == {} or other is False:
        return other
    return one if other in ({}, one) or one is False else {"allOf": [one, other]}

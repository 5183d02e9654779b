"""How nodes are stored: the files of pictures and sounds apart from items, so that each is there once; tokens as bytes.

A part of an item has in place of a file an object that names the file's digest. A client's items have texts there. A
token id takes four bytes, the number of a cell of a picture or a sound sixteen.
"""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from caravan_dialects.conversations.nodes import Json
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER

_NAME = "$file"
# A reference takes about as many characters.
_LEAST_CHARACTERS = 200

# Returns what stands in place of a value of a part.
_Change = Callable[[Any], Any]
# No id is as large. The number of a cell follows, without what all of them have.
_CELL = 0xFFFF_FFFF


def without_files(items: Sequence[Json]) -> tuple[list[Json], dict[bytes, str]]:
    """Return ``items`` with references in place of large files, and the files by their digests."""
    files: dict[bytes, str] = {}

    def reference(value: Any) -> Any:
        if not isinstance(value, str) or len(value) < _LEAST_CHARACTERS:
            return value
        digest = hashlib.sha256(value.encode()).digest()
        files[digest] = value
        return {_NAME: digest.hex()}

    return [_changed(item, reference) for item in items], files


def referenced(items: Sequence[Json]) -> list[bytes]:
    """Return the digest of each reference in ``items``."""
    found: list[bytes] = []

    def note(value: Any) -> Any:
        if isinstance(value, dict):
            found.append(bytes.fromhex(value[_NAME]))
        return value

    for item in items:
        _changed(item, note)
    return found


def with_files(items: Sequence[Json], files: Mapping[bytes, str]) -> tuple[Json, ...]:
    """Return ``items`` with the files that they refer to."""

    def content(value: Any) -> Any:
        return files[bytes.fromhex(value[_NAME])] if isinstance(value, dict) else value

    return tuple(_changed(item, content) for item in items)


def _changed(item: Json, change: _Change) -> Json:
    for key in ("content", "output"):
        if isinstance(parts := item.get(key), list):
            item = item | {key: [_changed_part(part, change) for part in parts]}
    return item


def _changed_part(part: Any, change: _Change) -> Any:
    match part:
        case {"type": "input_image", "image_url": url}:
            return part | {"image_url": change(url)}
        case {"type": "input_audio", "input_audio": {"data": data, **others}}:
            return part | {"input_audio": {**others, "data": change(data)}}
        case _:
            return part


_WORDS, _WORD_BITS = 3, 32


def packed(tokens: Sequence[int]) -> bytes:
    """Return the bytes of ``tokens``."""
    try:
        return array("I", tokens).tobytes()
    except OverflowError:
        return array("I", [word for token in tokens for word in _words(token)]).tobytes()


def unpacked(data: bytes) -> Sequence[int]:
    """Return the tokens of which `packed` made ``data``."""
    words = array("I", data)
    if _CELL not in words:
        return words
    tokens: list[int] = []
    at = 0
    while at < len(words):
        if words[at] != _CELL:
            tokens.append(words[at])
            at += 1
            continue
        number = sum(words[at + 1 + place] << (place * _WORD_BITS) for place in range(_WORDS))
        tokens.append(FIRST_CELL_NUMBER + number)
        at += 1 + _WORDS
    return tokens


def _words(token: int) -> Sequence[int]:
    if token < FIRST_CELL_NUMBER:
        return (token,)
    number = token - FIRST_CELL_NUMBER
    return (_CELL, *((number >> (place * _WORD_BITS)) & 0xFFFF_FFFF for place in range(_WORDS)))

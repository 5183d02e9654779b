"""Takes the files of pictures and sounds out of items, so that the store has each once, and puts them back.

A part of an item has in place of a file an object that names the file's digest. A client's items have texts there.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from caravan_dialects.conversations.nodes import Json

_NAME = "$file"
# A reference takes about as many characters.
_LEAST_CHARACTERS = 200

# Returns what stands in place of a value of a part.
_Change = Callable[[Any], Any]


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

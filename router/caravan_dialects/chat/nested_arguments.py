"""Reads lists and objects that a model writes as tags within tags, where the tag is the key: MiniMax M3.

<tree><deep><item>1</item><item>2</item></deep></tree>   is   {"tree": {"deep": [1, 2]}}
"""

from collections.abc import Mapping

import msgspec

from caravan_dialects.chat.argument_types import Schema, json_of, property_schema, resolved, types_of
from caravan_dialects.chat.tool_format import KEY, Tags

# Stands for the key of what is in a list.
ITEM = "item"
_MAX_DEPTH = 32


def nested_json(text: str, tags: Tags, schema: Schema, root: Schema | None, depth: int = _MAX_DEPTH) -> str | None:
    """Return the JSON of ``text``, a value of ``schema`` within ``root``; None if it is not made of tags."""
    children = _children(text.strip(), tags) if depth else None
    if not children:
        return None
    schema = resolved(schema, root)
    listed = all(key == ITEM for key, _ in children) and "array" in types_of(schema, root)
    parts = []
    for key, inner in children:
        child = _items(schema) if listed else property_schema(schema, key, root)
        value = nested_json(inner, tags, child, root, depth - 1)
        if value is None:
            value = json_of(inner, types_of(child, root))
        parts.append(value if listed else f"{_text(key)}: {value}")
    return f"[{', '.join(parts)}]" if listed else f"{{{', '.join(parts)}}}"


def _items(schema: Schema) -> Schema:
    items = schema.get("items")
    return items if isinstance(items, Mapping) else {}


def _children(text: str, tags: Tags) -> list[tuple[str, str]] | None:
    """Return the keys and the texts of all tags in ``text``; None if there is anything else between them."""
    found = []
    while text:
        if not text.startswith(tags.key_opening):
            return None
        key, closed, rest = text[len(tags.key_opening) :].partition(tags.key_closing)
        end = _end(rest, tags.key_opening + key + tags.key_closing, tags.value_closing.replace(KEY, key))
        if not closed or end is None:
            return None
        found.append((key, rest[: end[0]]))
        text = rest[end[1] :].strip()
    return found


def _end(text: str, opening: str, closing: str) -> tuple[int, int] | None:
    """Return where the tag that was opened before ``text`` is closed, and where its closing ends."""
    at, level = 0, 1
    while (end := text.find(closing, at)) >= 0:
        level += text.count(opening, at, end) - 1
        at = end + len(closing)
        if not level:
            return end, at
    return None


def _text(key: str) -> str:
    return msgspec.json.encode(key).decode()

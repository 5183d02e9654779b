"""Reads arguments that stand between tags, and writes them as JSON while they arrive.

MiniMax M3 writes lists and objects as tags within tags, where the tag is the key:

<tree><deep><item>1</item><item>2</item></deep></tree>   is   {"tree": {"deep": [1, 2]}}
"""

from collections.abc import Callable, Generator, Mapping, Sequence

from caravan_dialects.chat.argument_types import ALL, Schema, json_of, property_schema, resolved, types_of
from caravan_dialects.chat.call_text import SPACE, CallText, json_text, overlap
from caravan_dialects.chat.tool_format import KEY, Tags, units

# Stands for the key of what is in a list.
ITEM = "item"
_MAX_DEPTH = 32
_TEXT_ONLY = frozenset({"string"})
_MAX_KEY = 256


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
        parts.append(value if listed else f"{json_text(key)}: {value}")
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


class TagReader:
    """Reads from ``text``; ``emit`` takes the JSON. ``parameters``: the schema of the arguments, which has their types.

    A string is passed on as it arrives, any other value when it is complete.
    """

    __slots__ = ("_emit", "_parameters", "_tags", "_text")

    def __init__(self, text: CallText, emit: Callable[[str], None], tags: Tags, parameters: Schema | None) -> None:
        self._text = text
        self._emit = emit
        self._tags = tags
        self._parameters = parameters

    def begins(self, closings: Sequence[str]) -> Generator[None, None, bool]:
        """Return whether an argument follows, or one of ``closings``, or the end of a call without arguments."""
        start = self._text.at
        found = yield from self._text.accept_units(units(self._tags.key_opening))
        if not found:
            found = not (yield from self._text.skip())
            for closing in closings:
                found = found or (yield from self._text.follows(closing))
        self._text.at = start
        return found

    def arguments(self) -> Generator[None, None, bool]:
        """Read all arguments; return whether the last one is complete."""
        text = self._text
        self._emit("{")
        first = True
        while True:
            start = text.at
            if not (yield from text.accept_units(units(self._tags.key_opening))):
                break
            if (yield from text.follows("/")):
                # The key is the tag, and this is the tag that closes the call.
                text.at = start
                break
            key = yield from self._key()
            kinds = None if key is None else (yield from self._kinds(key))
            if key is None or kinds is None:
                # What was not read is text.
                text.at = start
                return False
            before = f"{'' if first else ', '}{json_text(key)}: "
            first = False
            if not (yield from self._value(key, kinds, before, start)):
                return False
        self._emit("}")
        return True

    def _key(self) -> Generator[None, None, str | None]:
        text, start = self._text, self._text.at
        closing = units(self._tags.key_closing)[0]
        while (end := text.text.find(closing, start)) < 0:
            if text.ended or len(text.text) - start > _MAX_KEY:
                return None
            yield
        text.at = end
        return text.text[start:end].strip()

    def _kinds(self, key: str) -> Generator[None, None, frozenset[str] | None]:
        """Read up to the value; return the types that it may have, None if it does not follow."""
        tags, text = self._tags, self._text
        kinds = types_of(property_schema(self._parameters, key), self._parameters)
        if (yield from text.accept_units(units(tags.key_closing))):
            if tags.kinds:
                word = yield from text.run(tags.kind_closing[0], _MAX_KEY)
                if not (yield from text.accept_units(units(tags.kind_closing))):
                    return None
                kinds = _kinds_of(tags, word, kinds)
        elif not tags.kinds or not (yield from text.accept_units(units(tags.kind_closing))):
            return None
        before_value = tags.kind_closing or tags.key_closing
        yield from text.accept(before_value[len(before_value.rstrip(SPACE)) :])
        return kinds

    def _value(self, key: str, kinds: frozenset[str], before: str, start: int) -> Generator[None, None, bool]:
        """Read a value and write it behind ``before``. ``start``: where the argument begins."""
        text, closing = self._text, self._tags.value_closing.replace(KEY, key)
        bare = closing.strip()
        space = closing[: len(closing) - len(closing.lstrip())]
        streams = kinds == _TEXT_ONLY
        if streams:
            self._emit(before + '"')
        while (end := text.text.find(bare, text.at)) < 0:
            if streams:
                # The white space before the closing, too, is held back.
                held = max(overlap(text.text, closing, text.at), overlap(text.text, bare, text.at))
                self._emit(json_text(text.text[text.at : len(text.text) - held])[1:-1])
                text.drop(len(text.text) - held)
                text.at = 0
            if text.ended:
                text.at = text.at if streams else start
                return False
            yield
        value = text.text[text.at : end].removesuffix(space)
        self._emit(json_text(value)[1:-1] + '"' if streams else before + self._json_of(key, value, kinds))
        text.at = end + len(bare)
        return True

    def _json_of(self, key: str, value: str, kinds: frozenset[str]) -> str:
        if KEY in self._tags.value_closing:
            schema = property_schema(self._parameters, key)
            nested = nested_json(value, self._tags, schema, self._parameters)
            if nested is not None:
                return nested
        return json_of(value, kinds)


def _kinds_of(tags: Tags, word: str, kinds: frozenset[str]) -> frozenset[str]:
    """Return the types that ``word``, which stands before a value, means; ``kinds`` if it is unknown."""
    named = frozenset(kind for kind, known in tags.kinds if known == word)
    if not named:
        return kinds
    return named if "string" in named else (kinds & (ALL - _TEXT_ONLY)) or ALL - _TEXT_ONLY

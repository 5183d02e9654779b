"""Grammars of arguments that are written as literals: Python's, or Gemma's, which have quotes of their own."""

from collections.abc import Sequence
from typing import Any

import msgspec

from caravan_dialects.chat.argument_types import Schema
from caravan_dialects.chat.call_text import CallText
from caravan_dialects.chat.grammar_terms import key_term, quoted, text_term, times, without
from caravan_dialects.chat.literal_reader import LiteralReader
from caravan_dialects.chat.schema_alternatives import further_of, is_plain, kinds_of, members_of, only
from caravan_dialects.chat.schema_references import UnsupportedSchemaError
from caravan_dialects.chat.tag_grammar import check_counts
from caravan_dialects.chat.value_grammar import Values

_CONSTANTS = {"python": {True: "True", False: "False", None: "None"}, "": {True: "true", False: "false", None: "null"}}
_ORDER = ("string", "integer", "number", "boolean", "null", "array", "object")
_MAX_NESTED = 64
_MAX_KEY = 48


class LiteralGrammar:
    """``quote``: the delimiter of strings as a reader sees it; "" for Python's. ``assigns``: what follows a name."""

    def __init__(self, values: Values, quote: str, read_quote: str, assigns: str) -> None:
        self._values = values
        self._quote = quote
        self._read_quote = read_quote
        self._assigns = assigns
        self._separator = "," if quote else ", "
        self._words = _CONSTANTS["" if quote else "python"]
        self._made: dict[bytes, str] = {}
        self._depth = 0

    def arguments(self) -> str:
        """Return a term for all arguments. Raises UnsupportedSchemaError."""
        values = self._values
        found = [only("object", one) for one in values.alternatives(values.root) if "object" in kinds_of(one)]
        if not found:
            raise UnsupportedSchemaError("no object matches it")
        return values.rule(" | ".join(self._members(one, top=True) for one in found))

    def _value(self, schema: Any) -> str:
        """Return a rule for a value of ``schema``, which may refer to itself."""
        key = msgspec.json.encode(schema)
        if key not in self._made:
            self._depth += 1
            if self._depth > _MAX_NESTED:
                raise UnsupportedSchemaError("it is nested too deeply")
            self._made[key] = self._values.reserved()
            terms = [term for one in self._values.alternatives(schema) for term in self._alternative(one)]
            self._values.filled(self._made[key], " | ".join(terms))
            self._depth -= 1
        return self._made[key]

    def _alternative(self, schema: Schema) -> Sequence[str]:
        if "enum" in schema:
            return [self._literal(value) for value in schema["enum"]]
        kinds = kinds_of(schema)
        return [self._of(kind, only(kind, schema)) for kind in _ORDER if kind in kinds]

    def _literal(self, value: Any) -> str:
        written = self._written(value, self._read_quote)
        if self._read(f"k{self._assigns}{written}", "k") != msgspec.json.encode(value):
            raise UnsupportedSchemaError("a value of it cannot be written in the syntax of this model")
        return self._values.terms.text(self._written(value, self._quote))

    def _of(self, kind: str, schema: Schema) -> str:
        values = self._values
        match kind:
            case "string" if self._quote:
                return f"{values.terms.text(self._quote)} {self._text(schema)}"
            case "string" if is_plain(schema):
                # Quotes of either kind, without escapes in single ones.
                return f"{values.json(schema)} | /'[^'\\\\\\n]*'/"
            case "string" | "integer" | "number":
                return values.json(schema)
            case "boolean":
                return f'"{self._words[True]}" | "{self._words[False]}"'
            case "null":
                return f'"{self._words[None]}"'
            case "array":
                return f'"[" {self._items(schema)} "]"'
            case _:
                return f'"{{" {values.rule(self._members(schema, top=False))} "}}"'

    def _text(self, schema: Schema) -> str:
        """Return a term for a text, and the quote that closes it."""
        values, quote = self._values, self._quote
        if values.terms.is_control(quote):
            return f"{values.terminal(text_term(schema))} {values.terms.text(quote)}"
        return values.terminal(f"({text_term(schema)} & {without(quote)}) {quoted(quote)}")

    def _items(self, schema: Schema) -> str:
        if schema.get("uniqueItems") and schema.get("maxItems", 2) > 1:
            raise UnsupportedSchemaError("`uniqueItems` cannot be enforced in the syntax of this model's calls")
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            # Before there was `prefixItems`.
            first, rest = rest, schema.get("additionalItems", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first = first[:most]
        if rest is False or most == len(first):
            if least > len(first):
                raise UnsupportedSchemaError("no list matches it")
            later = ""
        else:
            more = self._value(rest)
            if not first:
                return self._repeated(more, least, most)
            later = times(f"{quoted(self._separator)} {more}", max(0, least - len(first)), most and most - len(first))
        for at in range(len(first) - 1, -1, -1):
            term = f"{quoted(self._separator) if at else ''} {self._value(first[at])} {later}".strip()
            # What may be missing takes all that follows with it.
            later = f"({term})" if at < least else f"({term})?"
        return later

    def _repeated(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return ""
        later = f"{item} {times(f'{quoted(self._separator)} {item}', max(0, least - 1), most and most - 1)}"
        return later if least else f"({later})?"

    def _members(self, schema: Schema, *, top: bool) -> str:
        """Return a term for ``key value, …``, of the properties of ``schema`` in their order.

        ``top``: they are the arguments themselves, whose names Python writes without quotes.
        """
        members = members_of(schema)
        check_counts(schema, [needed for _, _, needed in members])
        if self._quote:
            # By name, as Gemma's template writes them.
            members.sort(key=lambda member: member[0].lower())
        separator = quoted(self._separator)
        later, first = self._further(schema, top=top) if not members else ('""', '""')
        for name, inner, needed in reversed(members):
            try:
                pair = f"{quoted(self._key(name, top=top))} {self._value(inner)}"
            except UnsupportedSchemaError as error:
                raise UnsupportedSchemaError(str(error), ("properties", name)) from error
            more = f"{separator} {pair} {later}" if needed else f"{separator} {pair} {later} | {later}"
            first = self._values.rule(f"{pair} {later}" if needed else f"{pair} {later} | {first}")
            later = self._values.rule(more)
        return first

    def _further(self, schema: Schema, *, top: bool) -> tuple[str, str]:
        """Return terms for properties that have no names: behind others, and first."""
        further = further_of(schema)
        if further is None or (top and further[1] is True):
            return '""', '""'
        name = self._values.terminal(key_term(further[0], _MAX_KEY, ()))
        key = f'{name} "{self._assigns if top else ":"}"' if self._quote or top else f'"\\"" {name} "\\": "'
        pair = self._values.rule(f"{key} {self._value(further[1])}")
        return "", self._repeated(pair, min(1, schema.get("minProperties", 0)), schema.get("maxProperties")) or '""'

    def _key(self, name: str, *, top: bool) -> str:
        if not top and not self._quote:
            return f"{msgspec.json.encode(name).decode()}: "
        assigns = self._assigns if top else ":"
        if self._read(f"{name}{self._assigns}1", name) is None:
            raise UnsupportedSchemaError("such a name cannot be written in the syntax of this model")
        return f"{name}{assigns}"

    def _read(self, argument: str, name: str) -> bytes | None:
        """Return the JSON of the value that a reader finds in ``argument``; None if that is not of ``name``."""
        text, emitted = CallText(), list[str]()
        text.add(f"{argument}{')' if self._assigns == '=' else '}'}")
        text.ended = True
        reading = LiteralReader(text, emitted.append, self._read_quote)
        for _ in reading.arguments(text.text[-1], self._assigns, ()):
            pass
        try:
            found = msgspec.json.decode("".join(emitted))
        except msgspec.DecodeError:
            return None
        complete = text.at == len(text.text) and [*found] == [name]
        return msgspec.json.encode(found[name]) if complete else None

    def _written(self, value: Any, quote: str) -> str:
        match value:
            case str() if quote:
                return f"{quote}{value}{quote}"
            case bool() | None:
                return self._words[value]
            case list():
                return f"[{self._separator.join(self._written(item, quote) for item in value)}]"
            case dict():
                pairs = (f"{self._key(str(key), top=False)}{self._written(item, quote)}" for key, item in value.items())
                return f"{{{self._separator.join(pairs)}}}"
            case _:
                return msgspec.json.encode(value).decode()

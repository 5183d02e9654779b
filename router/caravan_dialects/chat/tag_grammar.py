"""Grammars of arguments that stand between tags, where texts have no quotes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.chat.argument_types import ALL, Schema, property_schema, types_of
from caravan_dialects.chat.call_text import CallText
from caravan_dialects.chat.grammar_terms import (
    begun_unlike,
    key_term,
    not_begun,
    plain_term,
    quoted,
    text_term,
    times,
    unlike,
    without,
)
from caravan_dialects.chat.schema_alternatives import (
    further_of,
    is_plain,
    kinds_of,
    members_of,
    only,
)
from caravan_dialects.chat.schema_references import UnsupportedSchemaError
from caravan_dialects.chat.tag_reader import ITEM, TagReader
from caravan_dialects.chat.tool_format import KEY, Tags
from caravan_dialects.chat.value_grammar import Values

_MAX_DEPTH = 32
_MAX_KEY = 64
# A name that stands for any.
_SOME_KEY = "k"
# What the rules of tags within tags do not know.
_JSON_ONLY = frozenset({
    "$dynamicRef", "additionalItems", "allOf", "anyOf", "const", "contains", "dependentRequired", "dependentSchemas",
    "else", "enum", "if", "maxItems", "maxProperties", "minItems", "minProperties", "not", "oneOf",
    "patternProperties", "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    "uniqueItems",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """``read``: the tags as a reader sees them, with marks before control tokens. ``given``: its schema."""

    values: Values
    tags: Tags
    read: Tags
    given: Schema

    def arguments(self) -> str:
        """Return a term for all arguments. Raises UnsupportedSchemaError."""
        bodies = [
            self._members(only("object", one), _Seen(self.given, self.given), _MAX_DEPTH)
            for one in self.values.alternatives(self.values.root)
            if "object" in kinds_of(one)
        ]
        if not bodies:
            raise UnsupportedSchemaError("no object matches it")
        return bodies[0] if len(bodies) == 1 else self.values.rule(" | ".join(body or '""' for body in bodies))

    def _members(self, schema: Schema, seen: "_Seen", depth: int) -> str:
        """Return a term for the arguments of ``schema``. ``seen``: what readers have in its place."""
        members = members_of(schema)
        check_counts(schema, [needed for _, _, needed in members])
        terms = []
        for name, inner, needed in members:
            try:
                term = self._argument(name, inner, seen.kinds_of(name), depth)
            except UnsupportedSchemaError as error:
                raise UnsupportedSchemaError(str(error), ("properties", name)) from error
            terms.append(term if needed else f"{term}?")
        further = further_of(schema)
        if further is not None and further[1] is not True and not members:
            terms.append(self._further(schema, *further))
        return " ".join(terms)

    def _further(self, schema: Schema, pattern: str, inner: Any) -> str:
        if KEY in self.tags.value_closing:
            raise UnsupportedSchemaError("properties without a name cannot be written in the syntax of this model")
        key = self.values.terminal(key_term(pattern, _MAX_KEY, ()))
        opening, terms = self.values.terms.text(self.tags.key_opening), self.values.terms
        kinds = self.values.types_of(inner if isinstance(inner, Mapping) else {})
        body = self._value(_Place(_SOME_KEY, kinds, self.tags.value_closing), inner, _MAX_DEPTH)
        pairs = [f"{opening} {key} {terms.text(before)} {value}" for before, value in body]
        return times(" | ".join(pairs), min(1, schema.get("minProperties", 0)), schema.get("maxProperties"))

    def _argument(self, key: str, schema: Any, kinds: frozenset[str], depth: int) -> str:
        """Return a rule for an argument with its tags. ``kinds``: the types that the reader takes it for."""
        place = _Place(key, kinds, self.tags.value_closing.replace(KEY, key))
        if self._read(place, "1", self._word("integer" if "string" not in place.kinds else "string")) is _NOTHING:
            raise UnsupportedSchemaError("such a name cannot be written in the syntax of this model")
        opening = self.tags.key_opening + key
        return self.values.rule(
            " | ".join(
                f"{self.values.terms.text(opening + before)} {value}"
                for before, value in self._value(place, schema, depth)
            )
        )

    def _word(self, kind: str) -> str:
        words = dict(self.tags.kinds)
        # No template was asked about null. Readers do not tell the words of what is no text apart.
        return words.get(kind, words.get("array", ""))

    def _value(self, place: "_Place", schema: Any, depth: int) -> Iterator[tuple[str, str]]:
        """Yield what stands between a name and a value, and the term of a value and what closes it."""
        found = self.values.alternatives(schema)
        texts = [one for one in found if "string" in kinds_of(one)]
        middle = self.tags.key_closing, self.tags.kind_closing
        closing = self.values.terms.text(place.closing)
        if not texts and len({self._word(kind) for one in found for kind in kinds_of(one)}) == 1:
            word = self._word(min(kinds_of(found[0])))
            value = self._nested(schema, depth) if KEY in self.tags.value_closing else None
            yield word.join(middle), f"{value or self._bare(place, found, schema)} {closing}"
        elif self.tags.kinds:
            for word in dict.fromkeys(self._word(kind) for kind in sorted(ALL)):
                kinds = frozenset(kind for kind in ALL if self._word(kind) == word)
                parts = [part for one in found if (part := _narrowed(one, kinds)) is not None]
                if parts and "string" in kinds:
                    yield word.join(middle), self._texts(place.of(frozenset({"string"})), parts)
                elif parts:
                    yield word.join(middle), f"({' | '.join(self._json(place, part) for part in parts)}) {closing}"
        else:
            yield "".join(middle), self._texts(place, found)

    def _bare(self, place: "_Place", found: Sequence[Schema], schema: Any) -> str:
        """Return a rule for JSON, or for Python's words, which templates write, too."""
        if all(is_plain(one) and kinds_of(one) == {"boolean"} for one in found):
            return self.values.rule('"true" | "false" | "True" | "False"')
        return self._json(place, schema)

    def _json(self, place: "_Place", schema: Any) -> str:
        bare = place.closing.strip()
        if not self.values.terms.is_control(bare):
            for text in _constants(schema):
                if bare in msgspec.json.encode(text).decode():
                    raise _closing_error(bare)
        return self.values.json(schema)

    def _texts(self, place: "_Place", found: Sequence[Schema]) -> str:
        """Return a term for a value that is one of ``found``, and of what closes it, where texts have no quotes."""
        values, closing = self.values, place.closing
        literals = self._literals(place, [value for one in found for value in one.get("enum", ())])
        open_ones = [only(kind, one) for one in found if "enum" not in one for kind in sorted(kinds_of(one))]
        open_ones = [one for one in open_ones if one["type"] != ["integer"] or {"type": ["number"]} not in open_ones]
        free = [one for one in open_ones if one["type"] == ["string"]]
        others = [one for one in open_ones if one["type"] != ["string"]]
        if not free:
            choices = [*map(quoted, literals), *(self._json(place, one) for one in others)]
            if not choices:
                raise UnsupportedSchemaError("none of its values can be distinguished from values of other types")
            return f"({' | '.join(choices)}) {values.terms.text(closing)}"
        plain = {one["type"][0] for one in others if is_plain(one)}
        plain |= {"integer"} if "number" in plain else set()
        bounded = {one["type"][0] for one in others} - plain
        bounds, lexemes = self._bounds(place, plain), [one for one in others if one["type"][0] in bounded]
        if not any(map(is_plain, free)):
            # A free text stands for plain values of all types, too.
            lexemes += [one for one in others if is_plain(one) and plain_term(one["type"][0]) is None]
            literals_of_types = [term for kind in sorted(plain) if (term := plain_term(kind)) is not None]
        else:
            literals_of_types = []
        bounds += [begun_unlike(one["type"][0]) for one in lexemes]
        text = " & ".join([f"({' | '.join(map(text_term, free))})", *dict.fromkeys(bounds)])
        end = closing if not values.terms.is_control(closing.lstrip()) else closing[: -len(closing.lstrip())]
        whole = (
            f"(({text}) | {' | '.join([*map(quoted, literals), *literals_of_types])})"
            if literals or literals_of_types
            else f"({text})"
        )
        term = values.terminal(f"{whole} {quoted(end)}" if end else whole)
        rest = values.terms.text(closing[len(end) :])
        choices = [f"{term} {rest}", *(f"{self._json(place, one)} {values.terms.text(closing)}" for one in lexemes)]
        return f"({' | '.join(choices)})"

    def _bounds(self, place: "_Place", plain: set[str]) -> list[str]:
        """Return terms that a text must match, so that a reader takes it for a text as a whole."""
        bare = place.closing.strip()
        bounds = [] if self.values.terms.is_control(bare) else [without(bare)]
        others = place.kinds - {"string"}
        if others and KEY in self.tags.value_closing:
            bounds.append(not_begun(self.tags.key_opening))
        return bounds + [unlike(kind) for kind in sorted(others - plain)]

    def _literals(self, place: "_Place", allowed: Sequence[Any]) -> list[str]:
        """Return the texts of ``allowed``, but for those that can be read as nothing that is allowed."""
        texts, bare, known = [], place.closing.strip(), {_sorted_json(value) for value in allowed}
        for value in allowed:
            text = value if isinstance(value, str) else self.values.json_text(value)
            read = self._read(place, text, self._word("string") if place.kinds == {"string"} else "")
            if read is _NOTHING:
                raise _closing_error(bare)
            if _sorted_json(read) in known:
                texts.append(text)
        return [*dict.fromkeys(texts)]

    def _read(self, place: "_Place", value: str, word: str) -> Any:
        """Return what a reader makes of an argument whose value is written as ``value``; _NOTHING if of another."""
        tags, text, emitted = self.read, CallText(), list[str]()
        closing = tags.value_closing.replace(KEY, place.key)
        text.add(tags.key_opening + place.key + tags.key_closing + word + tags.kind_closing + value + closing)
        text.ended = True
        types: Schema = {"properties": {place.key: {"type": sorted(place.kinds)}}}
        for _ in TagReader(text, emitted.append, tags, types).arguments():
            pass
        try:
            arguments = msgspec.json.decode("".join(emitted))
        except msgspec.DecodeError:
            return _NOTHING
        complete = not text.text[text.at :].strip() and [*arguments] == [place.key]
        return arguments[place.key] if complete else _NOTHING

    def _nested(self, schema: Any, depth: int) -> str | None:
        """Return a rule for a value as tags within tags, see `nested_arguments`; None if it must be JSON."""
        schema = self.values.resolved(schema)
        if not depth or _JSON_ONLY & schema.keys():
            return None
        kinds = self.values.types_of(schema)
        items = schema.get("items")
        if kinds == {"array"} and isinstance(items, Mapping):
            return self.values.rule(f'"[]" | {self._argument(ITEM, items, self.values.types_of(items), depth - 1)}+')
        # Without a tag it would be a text.
        members = members_of(only("object", schema)) if kinds == {"object"} else []
        if any(needed for _, _, needed in members):
            return self.values.rule(self._members(only("object", schema), _Seen(schema, self.values.root), depth - 1))
        return None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A ``schema`` of an object, within ``root``, as readers have it."""

    schema: Schema
    root: Schema

    def kinds_of(self, name: str) -> frozenset[str]:
        return types_of(property_schema(self.schema, name, self.root), self.root)


@dataclass(frozen=True, slots=True)
class _Place:
    """``kinds``: the types that the reader takes a value of ``key`` for."""

    key: str
    kinds: frozenset[str]
    closing: str

    def of(self, kinds: frozenset[str]) -> "_Place":
        return _Place(self.key, kinds, self.closing)


_NOTHING = object()


def check_counts(schema: Schema, needed: Sequence[bool]) -> None:
    """Raise UnsupportedSchemaError if the properties that may be left out could be too few or too many."""
    further = further_of(schema) is not None and not needed
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if least > (1 if further else sum(needed)):
        raise UnsupportedSchemaError("`minProperties` cannot be enforced in the syntax of this model's calls")
    if most is not None and most < len(needed):
        raise UnsupportedSchemaError("`maxProperties` cannot be enforced in the syntax of this model's calls")


def _closing_error(closing: str) -> UnsupportedSchemaError:
    return UnsupportedSchemaError(f"a value of it has {closing!r} in it, which ends it in the syntax of this model")


def _sorted_json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _narrowed(schema: Schema, kinds: frozenset[str]) -> Schema | None:
    """Return the part of an alternative that is of ``kinds``; None if there is none."""
    found = kinds_of(schema) & kinds
    if not found:
        return None
    if "enum" in schema:
        return {"enum": [value for value in schema["enum"] if isinstance(value, str) == ("string" in kinds)]}
    return {**schema, "type": sorted(found)}


def _constants(schema: Any) -> Iterator[Any]:
    """Yield the values that ``schema`` names, and the names of properties."""
    if isinstance(schema, list):
        for part in schema:
            yield from _constants(part)
    elif isinstance(schema, Mapping):
        yield from schema.get("enum", ()) if isinstance(schema.get("enum"), list) else ()
        yield from (schema["const"],) if "const" in schema else ()
        for key, part in schema.items():
            if key == "properties" and isinstance(part, Mapping):
                yield from part
            if key not in ("enum", "const"):
                yield from _constants(part)

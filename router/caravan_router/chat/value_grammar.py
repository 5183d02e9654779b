"""Grammars of arguments that are not written as JSON."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from caravan_router.chat.argument_types import Schema, resolved, types_of
from caravan_router.chat.closed_schema import json_layout, without_definitions
from caravan_router.chat.grammar_terms import Terms, json_term, literal_regex, quoted
from caravan_router.chat.schema_problem import UnsupportedSchemaError

_CONSTANTS = {"python": {True: "True", False: "False", None: "None"}, "": {True: "true", False: "false", None: "null"}}
_ORDER = ("string", "integer", "number", "boolean", "null", "array", "object")
_MAX_DEPTH = 32
_STRING_BOUNDS = frozenset({"pattern", "format", "minLength", "maxLength"})


class Values:
    """Adds rules for values to ``rules``. ``root``: the schema of all arguments, which holds what others refer to."""

    def __init__(self, terms: Terms, rules: list[str], root: Schema, *, compact: bool) -> None:
        self.terms = terms
        self._rules = rules
        self._root = root
        self._layout = json_layout(compact=compact)
        self._made: dict[str, str] = {}

    def types_of(self, schema: Schema) -> frozenset[str]:
        return types_of(schema, self._root)

    def resolved(self, schema: Schema) -> Schema:
        return resolved(schema, self._root)

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; return its name."""
        name = f"v{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def json(self, schema: Schema) -> str:
        """Return a rule for JSON."""
        whole = {**schema, **without_definitions(self._root)[1], "x-guidance": self._layout}
        key = msgspec.json.encode(whole).decode()
        if key not in self._made:
            self._made[key] = self.rule(json_term(whole))
        return self._made[key]

    def bare(self, schema: Schema) -> str:
        """Return a rule for JSON, or for Python's words, which templates write, too."""
        if self.types_of(schema) == {"boolean"} and _allowed(self.resolved(schema)) is None:
            return self.rule('"true" | "false" | "True" | "False"')
        return self.json(schema)

    def text_until(self, schema: Schema, closing: str) -> str:
        """Return a rule for a text of ``schema``, without quotes, and for ``closing`` behind it."""
        schema = self.resolved(schema)
        end = self.terms.text(closing)
        if (allowed := _allowed(schema)) is not None:
            texts = [value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in allowed]
            return self.rule(f"({' | '.join(map(quoted, texts))}) {end}")
        # White space before a control token is read as part of the text.
        bare = closing.lstrip()
        regex = _text_regex(schema)
        if self.terms.is_control(bare):
            space = literal_regex(closing[: len(closing) - len(bare)])
            return self.rule(f"/{regex}{space}/ {self.terms.text(bare)}")
        # Up to the first closing.
        return self.rule(f"/{regex}{literal_regex(closing)}/", "[lazy]")

    def literal(self, schema: Schema, quote: str, depth: int = _MAX_DEPTH) -> str:
        """Return a rule for a literal: Gemma's, with strings in ``quote``, or if that is empty, Python's."""
        if not depth:
            raise UnsupportedSchemaError("it is nested too deeply, or refers to itself")
        schema = self.resolved(schema)
        if (allowed := _allowed(schema)) is not None:
            return self.rule(" | ".join(self.terms.text(literal_of(value, quote)) for value in allowed))
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list):
                return self.rule(" | ".join(self.literal(option, quote, depth - 1) for option in options))
        kinds = self.types_of(schema)
        found = [self._literal(kind, schema, quote, depth) for kind in _ORDER if kind in kinds]
        return found[0] if len(found) == 1 else self.rule(" | ".join(found))

    def _literal(self, kind: str, schema: Schema, quote: str, depth: int) -> str:
        only = {**schema, "type": kind}
        words = _CONSTANTS["" if quote else "python"]
        match kind:
            case "string" if quote:
                return self.rule(f"{self.terms.text(quote)} {self.text_until(only, quote)}")
            case "string" if not schema.keys() & _STRING_BOUNDS:
                # Quotes of either kind, without escapes in single ones.
                return self.rule(f"{self.json(only)} | /'[^'\\\\\\n]*'/")
            case "string" | "integer" | "number":
                return self.json(only)
            case "boolean":
                return self.rule(f'"{words[True]}" | "{words[False]}"')
            case "null":
                return self.rule(f'"{words[None]}"')
            case "array":
                items = schema.get("items")
                separator = "," if quote else ", "
                if not isinstance(items, Mapping):
                    return self.json(only)
                item = self.literal(items, quote, depth - 1)
                some = f'{item} ("{separator}" {item})*'
                return self.rule(f'"[" {some} "]"' if schema.get("minItems") else f'"[" ({some})? "]"')
            case _:
                if not isinstance(schema.get("properties"), Mapping):
                    return self.json(only)
                return self.rule(f'"{{" {self.members(schema, quote, _key_of(quote), depth - 1)} "}}"')

    def _ordered(self, schema: Schema, *, sorts: bool) -> list[tuple[str, Schema]]:
        """Return the properties; ``sorts``: by name, as Gemma's template writes them."""
        found = [*properties_of(schema).items()]
        return sorted(found, key=lambda pair: pair[0].lower()) if sorts else found

    def members(self, schema: Schema, quote: str, key_of: Callable[[str], str], depth: int = _MAX_DEPTH) -> str:
        """Return a rule for ``key value, …``, of the properties of ``schema`` in their order."""
        pairs = [
            (f"{quoted(key_of(name))} {self.literal(inner, quote, depth)}", name in required_of(schema))
            for name, inner in self._ordered(schema, sorts=bool(quote))
        ]
        separator = quoted("," if quote else ", ")
        later, first = '""', '""'
        for pair, required in reversed(pairs):
            more = self.rule(f"{separator} {pair} {later}" if required else f"{separator} {pair} {later} | {later}")
            first = self.rule(f"{pair} {later}" if required else f"{pair} {later} | {first}")
            later = more
        return first


def properties_of(schema: Schema) -> dict[str, Schema]:
    """Return the schemas of the named properties."""
    properties = schema.get("properties")
    found = properties.items() if isinstance(properties, Mapping) else ()
    return {name: inner if isinstance(inner, Mapping) else {} for name, inner in found}


def required_of(schema: Schema) -> frozenset[str]:
    """Return the names of the properties that must be there."""
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def literal_of(value: Any, quote: str) -> str:
    """Return ``value`` as a literal."""
    match value:
        case str() if quote:
            return f"{quote}{value}{quote}"
        case bool() | None:
            return _CONSTANTS["" if quote else "python"][value]
        case list():
            return f"[{(',' if quote else ', ').join(literal_of(item, quote) for item in value)}]"
        case dict():
            pairs = (f"{_key_of(quote)(str(key))}{literal_of(item, quote)}" for key, item in value.items())
            return f"{{{(',' if quote else ', ').join(pairs)}}}"
        case _:
            return msgspec.json.encode(value).decode()


def _key_of(quote: str) -> Callable[[str], str]:
    return (lambda name: f"{name}:") if quote else (lambda name: f"{msgspec.json.encode(name).decode()}: ")


def _allowed(schema: Schema) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _text_regex(schema: Schema) -> str:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        start = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = (inner if end else inner[:-1]).replace("\\/", "/").replace("/", "\\/")
        return f"{start}({inner}){end}"
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        return f"(?s:.{{{least or 0},{'' if most is None else most}}})"
    return "(?s:.*)"

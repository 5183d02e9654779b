"""Rules of a grammar for values, the JSON among them."""

from collections.abc import Mapping
from typing import Any

import msgspec

from caravan_dialects.chat.argument_types import Schema, resolved, target_of, types_of
from caravan_dialects.chat.closed_schema import json_layout
from caravan_dialects.chat.grammar_terms import Terms, json_term
from caravan_dialects.chat.schema_alternatives import alternatives
from caravan_dialects.chat.schema_references import UnsupportedSchemaError

# More than a shard takes.
_MAX_RULES = 4000
_MAX_CHARACTERS = 1 << 18
# Words whose values are data, in which "$ref" refers to nothing.
_DATA = frozenset({"const", "enum", "default", "examples"})


class Values:
    """Adds rules for values to ``rules``. ``root``: the schema of all arguments, which holds what others refer to."""

    def __init__(self, terms: Terms, rules: list[str], root: Schema, *, compact: bool) -> None:
        self.terms = terms
        self.root = root
        self._rules = rules
        self._layout = json_layout(compact=compact)
        self._encoder = (",", ":") if compact else (", ", ": ")
        # By the schema: its alternatives, and the rule for its JSON.
        self._found: dict[bytes, list[Schema]] = {}
        self._made: dict[bytes, str] = {}
        self._characters = 0

    def types_of(self, schema: Schema) -> frozenset[str]:
        return types_of(schema, self.root)

    def resolved(self, schema: Schema) -> Schema:
        return resolved(schema, self.root)

    def alternatives(self, schema: Any) -> list[Schema]:
        """Return the alternatives of ``schema``. Raises UnsupportedSchemaError, also if there are none."""
        key = msgspec.json.encode(schema)
        if key not in self._found:
            self._found[key] = alternatives(schema, self.root)
        if not self._found[key]:
            raise UnsupportedSchemaError("no value matches it")
        return self._found[key]

    def rule(self, body: str) -> str:
        """Add a rule; return its name."""
        name = self.reserved()
        return self.filled(name, body)

    def reserved(self) -> str:
        """Return the name of a rule that gets its body later, so that it can refer to itself."""
        if len(self._rules) >= _MAX_RULES:
            raise UnsupportedSchemaError(f"its grammar has more than {_MAX_RULES} rules")
        self._rules.append("")
        return f"v{len(self._rules) - 1}"

    def filled(self, name: str, body: str) -> str:
        """Give the rule ``name`` its body."""
        self._put(name, f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a rule that is one regular expression, and therefore may have `&` and `~`; return its name."""
        name = self.reserved()
        self._put(name, f"{name.upper()}: {body}")
        return name.upper()

    def _put(self, name: str, rule: str) -> None:
        self._characters += len(rule)
        if self._characters > _MAX_CHARACTERS:
            raise UnsupportedSchemaError(f"its grammar has more than {_MAX_CHARACTERS} characters")
        self._rules[int(name[1:])] = rule

    def json(self, schema: Any) -> str:
        """Return a rule for JSON."""
        key = msgspec.json.encode(schema)
        if key not in self._made:
            self._made[key] = self.rule(json_term({**standing_alone(schema, self.root), "x-guidance": self._layout}))
        return self._made[key]

    def json_text(self, value: Any) -> str:
        """Return ``value`` as `json` writes it."""
        item, pair = self._encoder
        match value:
            case list():
                return f"[{item.join(map(self.json_text, value))}]"
            case dict():
                pairs = (f"{self.json_text(key)}{pair}{self.json_text(one)}" for key, one in value.items())
                return f"{{{item.join(pairs)}}}"
            case _:
                return msgspec.json.encode(value).decode()


def standing_alone(schema: Any, root: Schema) -> dict[str, Any]:
    """Return ``schema``, a part of ``root``, with all that it refers to as definitions of its own.

    Raises UnsupportedSchemaError.
    """
    names: dict[str, str] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, list):
            return [moved(inner) for inner in part]
        if not isinstance(part, Mapping):
            return part
        result = {key: value if key in _DATA else moved(value) for key, value in part.items()}
        if isinstance(reference := part.get("$ref"), str):
            result["$ref"] = f"#/$defs/{names.setdefault(reference, f'd{len(names)}')}"
        return {key: value for key, value in result.items() if key not in ("$defs", "definitions")}

    whole: dict[str, Any] = moved(schema) if isinstance(schema, Mapping) else ({} if schema else {"not": {}})
    definitions: dict[str, Any] = {}
    while len(definitions) < len(names):
        reference, name = next((text, name) for text, name in names.items() if name not in definitions)
        if (target := target_of(reference, root)) is None:
            raise UnsupportedSchemaError(f"the reference {reference!r} leads nowhere")
        definitions[name] = moved(target)
    return {**whole, "$defs": definitions} if definitions else whole

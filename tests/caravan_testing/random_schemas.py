"""Makes random JSON schemas with short instances: a matching output needs at most some 300 tokens."""

import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "size", "city", "tags", "a b", "naïve", "x", "émoji 🎈", 'quote"d', "line\nbreak", "id", "$ref", "0")
_PATTERNS = (
    "^[a-z]{2,6}$",
    "^(yes|no|perhaps)$",
    r"^\d{3}-\d{4}$",
    "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$",
    "^#[0-9a-f]{6}$",
)
_FORMATS = ("date", "ipv4", "uuid")
_VALUES: tuple[Any, ...] = (
    0,
    1,
    -7,
    2.5,
    "",
    "red",
    "dark green",
    'say "hi"',
    "\\",
    "ü",
    True,
    False,
    None,
    [],
    [1, "two"],
    {"k": "v"},
)


class SchemaMaker:
    """Makes one schema, which depends on ``source`` alone."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._definitions: dict[str, Schema] = {}

    def make(self) -> Schema:
        """Return a schema with the definitions that it refers to."""
        for name in ("leaf", "node")[: self._source.randrange(3)]:
            self._definitions[name] = self._schema(1)
        schema = self._schema(3)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _schema(self, depth: int) -> Schema:
        kinds = [self._string, self._integer, self._number, self._enum, self._const, self._plain]
        kinds += [self._reference] if self._definitions else []
        if depth > 0:
            kinds = kinds[:3] + 2 * [lambda: self._object(depth), lambda: self._array(depth)]
            kinds += [lambda: self._any_of(depth), lambda: self._nullable(depth), lambda: self._tuple(depth)]
        return self._source.choice(kinds)()

    def _string(self) -> Schema:
        kind = self._source.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._source.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._source.choice(_FORMATS)}
        least = self._source.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + self._source.randrange(12)}

    def _integer(self) -> Schema:
        low = self._source.randrange(-1000, 1000)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + self._source.randrange(2000)}
        if self._source.random() < 0.2:
            schema = {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 500, "multipleOf": 5}
        return schema

    def _number(self) -> Schema:
        low = round(self._source.uniform(-50, 50), 2)
        return {"type": "number", "minimum": low, "maximum": round(low + self._source.uniform(1, 100), 2)}

    def _enum(self) -> Schema:
        return {"enum": self._source.sample(_VALUES, self._source.randint(1, 5))}

    def _const(self) -> Schema:
        return {"const": self._source.choice(_VALUES)}

    def _plain(self) -> Schema:
        return {"type": self._source.choice(["boolean", "null", ["boolean", "null"]])}

    def _reference(self) -> Schema:
        return {"$ref": f"#/$defs/{self._source.choice(sorted(self._definitions))}"}

    def _object(self, depth: int) -> Schema:
        names = self._source.sample(_WORDS, self._source.randrange(1, 5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._schema(depth - 1) for name in names},
            "required": [name for name in names if self._source.random() < 0.7],
            "additionalProperties": False,
        }
        if self._source.random() < 0.2:
            schema = {
                "type": "object",
                # A name of any length may never end.
                "patternProperties": {"^[a-z]{1,8}$": self._schema(0)},
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": self._source.randint(1, 3),
                "title": "a map",
            }
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._source.randrange(3)
        return {
            "type": "array",
            "items": self._schema(depth - 1),
            "minItems": least,
            "maxItems": least + self._source.randrange(3),
        }

    def _tuple(self, depth: int) -> Schema:
        parts = [self._schema(depth - 1) for _ in range(self._source.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._schema(depth - 1) for _ in range(self._source.randint(2, 3))]}

    def _nullable(self, depth: int) -> Schema:
        return {"anyOf": [self._schema(depth - 1), {"type": "null"}], "description": "may be null"}


def random_schema(seed: int) -> Schema:
    """Return the schema of ``seed``."""
    return SchemaMaker(random.Random(seed)).make()

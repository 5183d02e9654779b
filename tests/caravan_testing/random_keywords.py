"""Makes random combinations of the keywords of JSON Schema: many match nothing, or cannot be enforced."""

import random
from typing import Any

Schema = dict[str, Any]

_PATTERNS = ("^a$", "^(a|b)$", "^[ab]$", "^a", "^b", "^[a-c]{1,2}$", r"^\d$", "^[a-c]+$", "^(?:a|bb)?$", "^score$")
_TEXTS = ("^[a-z]{2,4}$", "^a+$", "^(x|yy)$", "^b", r"^\d{3}$")
_NAMES = ("a", "b", "score", "bb")
_VALUES: tuple[Any, ...] = ("a", "b", 1, 2.5, None, True, [], {}, "é")
_BOUNDS = (0, 1, -3, 2.5, -0.5, 12, 0.1, 2**53 + 1, 2**60 + 1)


class KeywordMaker:
    """Makes schemas, which depend on ``source`` alone."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def make(self) -> Schema:
        """Return a schema, with the definition that it may refer to."""
        return {**self._schema(3), "$defs": {"d": self._schema(1)}}

    def _schema(self, depth: int) -> Schema:
        flat = [self._string, self._number, self._values, self._reference]
        nested = [self._object, self._object, self._array, self._combination]
        makers = flat + (nested if depth else [])
        return self._source.choice(makers)(depth - 1)

    def _with(self, schema: Schema, chance: float, **keywords: Any) -> Schema:
        return schema | {key: value for key, value in keywords.items() if self._source.random() < chance}

    def _string(self, _: int) -> Schema:
        least, most = self._source.randrange(4), self._source.randrange(5)
        text = {"type": "string"} | ({"pattern": self._source.choice(_TEXTS)} if self._source.random() < 0.5 else {})
        return self._with(text, 0.4, minLength=least, maxLength=most)

    def _number(self, _: int) -> Schema:
        schema: Schema = {"type": self._source.choice(["integer", "number"])}
        for keys in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            schema |= self._with({}, 0.6, **{self._source.choice(keys): self._source.choice(_BOUNDS)})
        return self._with(schema, 0.3, multipleOf=self._source.choice([2, 3, 0.5, 5]))

    def _values(self, _: int) -> Schema:
        return {"enum": self._source.sample(_VALUES, 3)}

    def _reference(self, _: int) -> Schema:
        return {"$ref": self._source.choice(["#/$defs/d", "#"])}

    def _object(self, depth: int) -> Schema:
        source = self._source
        few = source.sample(_NAMES, source.randrange(3))
        schema = self._with(
            {"type": "object"},
            0.5,
            properties={name: self._schema(depth) for name in few},
            patternProperties={name: self._schema(depth) for name in source.sample(_PATTERNS, source.randrange(1, 3))},
            additionalProperties=source.choice([False, False, self._schema(0)]),
            required=source.sample(_NAMES, source.randrange(3)),
        )
        names = ({"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 2}, {"type": "string"})
        # With more than one, llguidance counts a property twice that has the name of another.
        counts = {"minProperties": 1, "maxProperties": source.randrange(4)}
        return self._with(schema, 0.2, **counts, propertyNames=source.choice(names))

    def _array(self, depth: int) -> Schema:
        source = self._source
        first = [self._schema(depth)]
        schema = self._with({"type": "array"}, 0.6, items=self._schema(depth), maxItems=source.randrange(4))
        return self._with(schema, 0.4, prefixItems=first, minItems=source.randrange(3))

    def _combination(self, depth: int) -> Schema:
        combinator = self._source.choice(["anyOf", "oneOf", "allOf"])
        return {combinator: [self._schema(depth) for _ in range(self._source.randrange(1, 4))]}


def random_keywords(seed: int) -> Schema:
    """Return the schema of ``seed``."""
    return KeywordMaker(random.Random(seed)).make()

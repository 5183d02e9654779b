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


_NOTES: tuple[Schema, ...] = (
    {"description": "d", "title": "t", "examples": [{"type": "null"}], "default": {"$ref": "#/nowhere"}},
    {"deprecated": True, "readOnly": True, "x-order": 3, "$comment": "c", "contentEncoding": "base64"},
    {"minLength": 0, "minItems": 0, "minProperties": 0, "uniqueItems": False, "propertyNames": {"type": "string"}},
)
_TARGET = {"enum": ["description", 7, {"title": [None]}]}


def random_parameters(seed: int) -> Schema:
    """Return the schema of ``seed``: of an object, and so small that a matching text need not be long."""
    source = random.Random(seed)
    given = SchemaMaker(source).make()
    definitions = {**given.pop("$defs", {}), **_definitions()}
    parts = _parts()
    names = source.sample(sorted(parts), source.randrange(1, 4))
    properties = {"v": given, "description": {"type": "boolean"}} | {name: parts[name] for name in names}
    if source.random() < 0.3:
        properties["kids"] = {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}
    noted = {name: schema | source.choice(_NOTES) for name, schema in properties.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": noted,
        "required": [*properties],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _definitions() -> Schema:
    cat, dog = (_object(kind={"const": kind}, **{kind: {"type": "boolean"}}) for kind in ("cat", "dog"))
    inside = {"$id": "inside", **_object(near={"$ref": "#/$defs/near"}), "$defs": {"near": {"const": "near"}}}
    return {"a/b~%": _TARGET, "spot": {"$anchor": "spot", **_TARGET}, "cat": cat, "dog": dog, "inside": inside}


def _parts() -> dict[str, Schema]:
    """Return schemas by the names of their properties, to which some of them refer."""
    few = {"type": "object", "additionalProperties": False}
    tree = {"type": "array", "items": {"$ref": "#/properties/tree"}, "maxItems": 2}
    own = _object(e={"$ref": "#/properties/own/$defs/E"}) | {"$defs": {"E": _TARGET}}
    return {
        "anchored": {"$ref": "#spot"},
        "bounded": {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**63 - 1},
        "escaped": {"$ref": "#/$defs/a~1b~0%25"},
        "inside": {"$ref": "inside"},
        "listed": few | {"patternProperties": {"^(x|y)$": {"type": "boolean"}}, "properties": {"x": {"const": True}}},
        "map": few | {"additionalProperties": {"type": "null"}, "propertyNames": {"enum": ["m", "n"]}},
        "near": {"$ref": "inside#/$defs/near"},
        "one": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null", "format": "none"}]},
        "own": own,
        "tree": tree,
        "twice": {"$ref": "#/properties/v"},
    }


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_RANDOM_KEYWORDS_PATTERNS = (
    "^a$",
    "^(a|b)$",
    "^[ab]$",
    "^a",
    "^b",
    "^[a-c]{1,2}$",
    r"^\d$",
    "^[a-c]+$",
    "^(?:a|bb)?$",
    "^score$",
)
_TEXTS = ("^[a-z]{2,4}$", "^a+$", "^(x|yy)$", "^b", r"^\d{3}$")
_NAMES = ("a", "b", "score", "bb")
_RANDOM_KEYWORDS_VALUES: tuple[Any, ...] = ("a", "b", 1, 2.5, None, True, [], {}, "é")
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
        return {"enum": self._source.sample(_RANDOM_KEYWORDS_VALUES, 3)}

    def _reference(self, _: int) -> Schema:
        return {"$ref": self._source.choice(["#/$defs/d", "#"])}

    def _object(self, depth: int) -> Schema:
        source = self._source
        few = source.sample(_NAMES, source.randrange(3))
        schema = self._with(
            {"type": "object"},
            0.5,
            properties={name: self._schema(depth) for name in few},
            patternProperties={
                name: self._schema(depth) for name in source.sample(_RANDOM_KEYWORDS_PATTERNS, source.randrange(1, 3))
            },
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

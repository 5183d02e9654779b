"""Bodies of requests with one odd field each, made of the schemas in openapi.json."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Deeper fields repeat the shapes of those above them.
_DEEPEST = 5
_LONG_TEXT = "x y" * 20_000
# As JSON, because no Python value is a number of this size, a lone surrogate or a name that is given twice.
ODD_VALUES = {
    "null": "null",
    "true": "true",
    "-1": "-1",
    "0": "0",
    "1.5": "1.5",
    "2.0": "2.0",
    "2^31": str(1 << 31),
    "-2^63-1": str(-(1 << 63) - 1),
    "2^64": str(1 << 64),
    "1e308": "1e308",
    "-1e-320": "-1e-320",
    "a number of 400 digits": "9" * 400,
    "no text": '""',
    "text": '"x"',
    "control characters": '"\\u0000\\u001b\\r\\n"',
    "a lone surrogate": '"\\ud800"',
    "a long text": json.dumps(_LONG_TEXT),
    "no items": "[]",
    "an item": '["x"]',
    "mixed items": '[null,1,"x",{},[]]',
    "many items": json.dumps([1] * 5_000),
    "deep lists": "[" * 200 + "]" * 200,
    "no members": "{}",
    "members": '{"x":1,"type":"x"}',
    "many members": json.dumps({f"x{number}": number for number in range(2_000)}),
}
_PLACE = "\ue000"


@dataclass(frozen=True, slots=True)
class Field:
    """A place in the body of an operation: names, and 0 for the first item of a list."""

    path: tuple[str | int, ...]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


class Schemas:
    """The schemas of an API's description."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._named = description["components"]["schemas"]

    def kinds(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas, without references and unions, any of which a value may have."""
        while "$ref" in schema:
            schema = self._named[schema["$ref"].rpartition("/")[2]]
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return [kind for part in schema[word] for kind in self.kinds(part)]
        return [schema]

    def least(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Return a small value that the schema allows, but for rules between its fields."""
        if "default" in schema and schema["default"] is not None:
            return schema["default"]
        kinds = self.kinds(schema)
        kind = next((kind for kind in kinds if kind.get("type") not in ("null", None)), kinds[0])
        for word in ("const", "enum", "examples"):
            if word in kind:
                return kind[word] if word == "const" else kind[word][0]
        match kind.get("type"):
            case "object":
                fields = kind.get("properties", {})
                return {
                    name: self.least(fields[name], depth + 1) for name in kind.get("required", ()) if name in fields
                }
            case "array":
                item = kind.get("items", {})
                return [self.least(item, depth + 1)] if depth < _DEEPEST and isinstance(item, dict) else []
            case "integer" | "number":
                return kind.get("minimum", 1)
            case "boolean":
                return False
            case "string":
                return "x"
            case _:
                return None

    def fields(self, schema: dict[str, Any], above: tuple[str | int, ...] = ()) -> Iterator[Field]:
        """Yield every place in a value of the schema, each path once."""
        seen = set()
        for field in self._fields(schema, above):
            if field.path not in seen:
                seen.add(field.path)
                yield field

    def _fields(self, schema: dict[str, Any], above: tuple[str | int, ...]) -> Iterator[Field]:
        if len(above) >= _DEEPEST:
            return
        for kind in self.kinds(schema):
            parts: dict[str | int, Any] = dict(kind.get("properties", {}))
            if isinstance(kind.get("items"), dict):
                parts[0] = kind["items"]
            for name, part in parts.items():
                yield Field((*above, name), part)
                yield from self._fields(part, (*above, name))

    def with_place(self, schema: dict[str, Any], base: Any, field: Field) -> str:
        """Return ``base`` as JSON with a mark where the field is. What is missing above it is made."""
        placed = self._placed(schema, base, field.path)
        assert placed is not None, field
        return json.dumps(placed)

    def _placed(self, schema: dict[str, Any], base: Any, path: tuple[str | int, ...]) -> Any:
        """Return None if no kind of the schema has the path."""
        if not path:
            return _PLACE
        name, rest = path[0], path[1:]
        for kind in self.kinds(schema):
            if name == 0 and isinstance(kind.get("items"), dict):
                first = base[0] if isinstance(base, list) and base else self.least(kind["items"])
                if (item := self._placed(kind["items"], first, rest)) is not None:
                    return [item]
            elif (part := kind.get("properties", {}).get(name)) is not None:
                whole = self.least({**kind, "default": None}) | (base if isinstance(base, dict) else {})
                below = whole.get(name, self.least(part) if rest else None)
                if (value := self._placed(part, below, rest)) is not None:
                    return whole | {name: value}
        return None


def odd_bodies(schemas: Schemas, schema: dict[str, Any], base: Any, field: Field) -> Iterator[tuple[str, bytes]]:
    """Yield names and JSON of bodies: the field with each odd value, missing, twice, and beside an unknown one."""
    placed, mark = schemas.with_place(schema, base, field), json.dumps(_PLACE)
    for name, value in ODD_VALUES.items():
        yield f"{field.name}: {name}", placed.replace(mark, value).encode()
    last = field.path[-1]
    if isinstance(last, str):
        valid = f"{json.dumps(last)}: {json.dumps(schemas.least(field.schema))}"
        for name, members in {
            "missing": f'"x-{last}": 1',
            "twice": f"{valid}, {valid}",
            "beside an unknown name": f'{valid}, "x-unknown": {{"a": [1]}}',
            "beside a name of control characters": f'{valid}, "\\u0000\\r\\n": 1',
        }.items():
            yield f"{field.name}: {name}", placed.replace(f"{json.dumps(last)}: {mark}", members).encode()

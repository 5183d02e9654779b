"""What the references of a schema mean within it, since nothing is fetched, and the error that names a place in it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Path = tuple[str | int, ...]

_MOST_LETTERS = 200
# Keywords whose value is a schema, a list of schemas, and schemas by name.
_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_IDS = ("$id", "id")


class UnsupportedSchemaError(Exception):
    """The schema cannot be enforced. ``path``: the place within the schema; empty for the whole."""

    def __init__(self, reason: str, path: Sequence[str | int] = ()) -> None:
        self.reason = reason
        self.path = path_text(path)
        super().__init__(f"`{self.path}`: {reason}" if path else reason)


class UnsupportedToolError(Exception):
    """The schema of a function's parameters cannot be enforced. ``name``: of the function."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(reason)


def path_text(path: Sequence[str | int]) -> str:
    """Return ``path`` as it is written in errors, such as ``properties.size.enum[2]``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    text = "".join(steps).removeprefix(".")
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


@dataclass(frozen=True, slots=True)
class Resource:
    """A schema with a URI of its own, relative to which the references within it are; and its place."""

    uri: str
    root: Any
    path: Path = ()


@dataclass(frozen=True, slots=True)
class Target:
    """What a reference means: ``schema``, which is within ``resource``, and the ``path`` that errors show."""

    schema: Any
    resource: Resource
    path: Path


class References:
    """The references of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.resource = entered(Resource("", root), root, ())
        self._targets: dict[str, Target] | None = None

    def target(self, reference: str, resource: Resource) -> Target | None:
        """Return what ``reference``, which is within ``resource``, means; None if it is not in the schema."""
        uri, fragment = urldefrag(reference)
        uri = _joined(resource.uri, uri)
        found = resource if uri == resource.uri else None
        if found is None:
            known = self._known().get(uri)
            found = None if known is None else known.resource
        if found is not None and fragment and not fragment.startswith("/"):
            return self._known().get(f"{uri}#{unquote(fragment)}")
        steps = [step.replace("~1", "/").replace("~0", "~") for step in unquote(fragment).split("/")[1:]]
        target = None if found is None else _walked(found, steps)
        if target is None and reference.startswith("#"):
            # Generators also give parts an id, and go on to refer to the definitions of the whole.
            target = _walked(self.resource, steps)
        return target

    @cached_property
    def has_parts(self) -> bool:
        """Whether a schema within the schema has a URI of its own."""
        return any(target.resource is not self.resource for target in self._known().values())

    def _known(self) -> dict[str, Target]:
        """Return the schemas that have a name, by their URI."""
        if self._targets is None:
            self._targets = {}
            for target in _subschemas(Target(self.resource.root, self.resource, ())):
                for uri in _uris(target):
                    self._targets.setdefault(uri, target)
        return self._targets


def entered(resource: Resource, schema: Any, path: Path) -> Resource:
    """Return the resource that ``schema``, at ``path`` in ``resource``, belongs to: its own if it has an id."""
    if isinstance(schema, Mapping):
        for key in _IDS:
            uri = urldefrag(text).url if isinstance(text := schema.get(key), str) else ""
            if uri:
                known = resource.uri and schema is resource.root
                return resource if known else Resource(_joined(resource.uri, uri), schema, path)
    return resource


def _joined(base: str, uri: str) -> str:
    if not uri:
        return base
    return urljoin(base, uri)


def _walked(resource: Resource, steps: Sequence[str]) -> Target | None:
    schema, path = resource.root, resource.path
    for step in steps:
        if isinstance(schema, Mapping) and step in schema:
            schema, path = schema[step], (*path, step)
        elif isinstance(schema, list) and _INDEX.fullmatch(step) and int(step) < len(schema):
            schema, path = schema[int(step)], (*path, int(step))
        else:
            return None
        resource = entered(resource, schema, path)
    return Target(schema, resource, path) if isinstance(schema, Mapping | bool) else None


def _uris(target: Target) -> Iterator[str]:
    if target.schema is target.resource.root:
        yield target.resource.uri
    for key in _IDS:
        # Before `$anchor` there was `$id: "#name"`.
        if isinstance(text := target.schema.get(key), str) and text.startswith("#"):
            yield f"{target.resource.uri}{text}"
    for key in _ANCHORS:
        if isinstance(text := target.schema.get(key), str):
            yield f"{target.resource.uri}#{text}"


def _subschemas(whole: Target) -> Iterator[Target]:
    """Yield all schemas within ``whole``, itself included; nothing that is data, such as the values of an enum."""
    waiting = [whole]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += [
            Target(schema, entered(found.resource, schema, path), path)
            for path, schema in (((*found.path, *steps), schema) for steps, schema in _children(found.schema))
            if isinstance(schema, Mapping)
        ]


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    for key in _ONE:
        if key in schema:
            yield (key,), schema[key]
    for key in _SEVERAL:
        if isinstance(several := schema.get(key), list):
            yield from (((key, index), each) for index, each in enumerate(several))
    for key in _NAMED:
        if isinstance(named := schema.get(key), Mapping):
            yield from (((key, name), each) for name, each in named.items())

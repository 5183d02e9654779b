"""No class of the product is larger than a reader can keep in mind, but for those that are named here with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from doc_tables import ROOT

PACKAGES = (
    "caravan",
    "proto/caravan_proto",
    "models/caravan_models",
    "router/caravan_dialects",
    "router/caravan_router",
    "router/caravan_scheduler",
    "router/caravan_serve",
    "router/caravan_studio",
    "shard/caravan_shard",
)
# Methods and attributes of the classes that it inherits from count too.
MOST_METHODS = 25
MOST_ATTRIBUTES = 15
MOST_LINES = 600

REASONS = {
    "Batcher": "the one owner of the requests of a model, and of the parts that work on them",
    "CandidateBackend": "the protocol `Backend`, and what of llama.cpp's backend chooses candidates",
    "Conversation": "the calls of a conversation in the library; its methods are what users look up",
    "Engine": "the parts that a step of the shard goes through, each of which is its own class",
    "Fleet": "what the HTTP layer asks of all models, each part with an attribute or a method",
    "LlamaCppBackend": "what the protocol `Backend` says that a model has, and llama.cpp's parts of it",
    "ModelMetrics": "one method for each thing that the HTTP layer and the engine observe",
    "Resident": "a record of a stay, with an owner for each field, which `test_owners` checks",
    "SchedulerState": "what all requests of a router share, each part with a method or two",
    "ShardAccount": "the parts of what is known of a shard, each of which answers its own questions",
    "ShardLedger": "the only writer of what is known of a shard, with a method for each thing that happens to it",
    "Sequence": "a record with an owner for each field, which `test_owners` checks",
    "Stays": "the stays of a shard by their status, and what is counted over them",
}


class Members(NamedTuple):
    """Of a class: ``attributes`` are its fields, and those that its methods assign to ``self``."""

    name: str
    bases: tuple[str, ...]
    methods: frozenset[str]
    attributes: frozenset[str]


def product_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name)


def test_no_class_is_too_large_without_a_reason() -> None:
    classes = [found for path in product_files() for found in behaving_classes(path)]
    by_name = {members.name: members for members in classes}
    sizes = [
        (one.name, len(one.methods), len(one.attributes)) for one in (_whole(by_name, members) for members in classes)
    ]
    too_large = [size for size in sizes if size[1] > MOST_METHODS or size[2] > MOST_ATTRIBUTES]
    assert {name for name, _, _ in too_large} == REASONS.keys(), too_large


def test_no_file_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in product_files()}
    assert {name for name, count in lines.items() if count > MOST_LINES} == set()


def _whole(by_name: dict[str, Members], members: Members) -> Members:
    """Return ``members`` with those of the bases."""
    bases = [_whole(by_name, by_name[base]) for base in members.bases if base in by_name and base != members.name]
    return members._replace(
        methods=members.methods.union(*(base.methods for base in bases)),
        attributes=members.attributes.union(*(base.attributes for base in bases)),
    )


def behaving_classes(path: Path) -> Iterator[Members]:
    """Yield the classes of ``path`` but for data: what has no methods, and frozen dataclasses such as flags."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and not any("frozen=True" in ast.unparse(one) for one in node.decorator_list):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            bases = tuple(ast.unparse(base).split(".")[-1] for base in node.bases)
            if methods:
                attributes = {one.id for one in fields if isinstance(one, ast.Name)} | _assigned(methods)
                yield Members(node.name, bases, frozenset(one.name for one in methods), frozenset(attributes))


def _assigned(methods: list[ast.FunctionDef | ast.AsyncFunctionDef]) -> set[str]:
    """Return the attributes that ``methods`` assign to ``self``."""
    return {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }

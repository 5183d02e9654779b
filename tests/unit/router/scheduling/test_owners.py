"""Each piece of state has one owner, as the package docstring of `scheduling` says."""

import ast
from pathlib import Path

import caravan_router.scheduling

ROOM = Path(caravan_router.scheduling.__file__).parent

# Modules that assign to attributes of objects other than their own ``self``, and these attributes.
WRITERS = {
    "beams.py": {"group"},
    "scheduler.py": {"fatal", "fatal_losses", "fatal_on", "losses", "now_s", "prompt_logprobs_delivered"},
    "state.py": {"charged", "fetches", "reached", "saved_on", "started"},
    "planning/openings.py": {"patient_until_s"},
    "shard/ledger.py": {
        "cells_left",
        "computed",
        "is_expendable",
        "landmarks",
        "last_used_s",
        "shared",
        "status",
        "steps_left",
        "target",
    },
    "shard/prefix_tree.py": {"length", "live", "node", "parent", "start", "tokens"},
    "shard/saved_runs.py": {"tier"},
    "waiting/queue.py": {"bypassed"},
}


def assigned_attributes(module: Path) -> set[str]:
    targets = [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
    ]
    return {node.attr for node in targets if not (isinstance(node.value, ast.Name) and node.value.id == "self")}


def test_only_owners_assign_to_attributes() -> None:
    modules = {str(path.relative_to(ROOM)): assigned_attributes(path) for path in ROOM.rglob("*.py")}
    for name, attributes in modules.items():
        assert attributes == WRITERS.get(name, set()), name


def test_no_attribute_has_two_writers() -> None:
    written = [attribute for attributes in WRITERS.values() for attribute in attributes]
    assert len(written) == len(set(written))

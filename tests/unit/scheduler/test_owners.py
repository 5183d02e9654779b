"""Each piece of state has one owner, as the package docstring of `scheduling` says."""

import ast
from pathlib import Path

import caravan_scheduler

ROOM = Path(caravan_scheduler.__file__).parent

# Modules that assign to attributes of objects other than their own ``self``, and these attributes.
WRITERS = {
    "scheduler.py": {"fatal", "fatal_losses", "fatal_on", "feedback", "losses", "now_s", "prompt_logprobs_delivered"},
    "state.py": {"account", "charged", "fetches", "group", "reached", "saved_on", "started"},
    "jobs/expected_return.py": {"held_s", "looked_s", "rent_paid_s", "return_rate"},
    "job.py": {"growth"},
    "jobs/jobs.py": {"calls_tools", "continues", "ended_s", "is_awaited", "is_continued", "job", "requests", "service"},
    "planning/admission.py": {"prefix_awaited_until_s"},
    "planning/moving.py": {"has_ended", "has_moved_prefixes"},
    "shard/account.py": {"shared"},
    "shard/ledger.py": {"computed", "is_expendable", "is_to_be_saved", "is_urgent", "spared", "tails", "target"},
    "prefix_tree.py": {"length", "live", "node", "parent", "start", "tokens"},
    "shard/saved_runs.py": {"lifetime", "loads", "tier", "usable_end", "used_s"},
    "shard/stays.py": {"last_used_s", "prefix_hashes", "status"},
    "waiting/fair_share.py": {"counter"},
    "waiting/queue.py": {"bypassed"},
}


# The operations that change a part of a shard's account.
CHANGES = {
    "capacity": {"set_layout"},
    "cells": {"forget", "index", "rebuild"},
    "claims": {"any_of", "note_prompt"},
    "commands": {"begin", "end", "end_step", "note_step"},
    "drain": {"begin"},
    "header": {"clear"},
    "media": {"forget", "note"},
    "saves": {"drop", "drop_unwanted", "expect", "give_up", "make_room", "note_runs", "note_saved"},
    "stays": {
        "cut_back",
        "enter",
        "free",
        "move",
        "note_progress",
        "note_use",
        "recycle",
        "take_id",
        "take_prefix_changes",
    },
}
# Those that modules call beside the ledger.
CHANGED_BY_OTHERS = {
    "scheduler.py": {"commands.end", "drain.begin", "saves.note_runs"},
    "results.py": {"media.forget", "media.note", "saves.drop", "saves.note_runs"},
    "planning/moving.py": {"saves.expect"},
    "planning/step_plan.py": {"claims.any_of"},
    "planning/shard_index.py": {"stays.take_prefix_changes"},
    "shard/prefix_reuse.py": {"cells.index"},
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


def called_changes(module: Path) -> set[str]:
    called = [
        f"{node.value.attr}.{node.attr}"
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    ]
    return {name for name in called if name.split(".")[1] in CHANGES.get(name.split(".")[0], ())}


def test_the_ledger_changes_the_parts_of_an_account() -> None:
    modules = {str(path.relative_to(ROOM)): called_changes(path) for path in ROOM.rglob("*.py")}
    by_ledger = modules.pop("shard/ledger.py")
    assert {name: called for name, called in modules.items() if called} == CHANGED_BY_OTHERS
    all_changes = {f"{part}.{operation}" for part, operations in CHANGES.items() for operation in operations}
    assert by_ledger.union(*CHANGED_BY_OTHERS.values()) == all_changes

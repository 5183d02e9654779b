"""The signatures of the public Python API are those that were committed: a change of them is meant."""

import difflib

import python_api


def test_no_signature_changes_unnoticed() -> None:
    committed, current = python_api.FILE.read_text(), python_api.render()
    changes = "\n".join(
        difflib.unified_diff(committed.splitlines(), current.splitlines(), "committed", "now", n=1, lineterm="")
    )
    assert committed == current, (
        f'the Python API has changed:\n{changes}\nIf that is meant, and allowed by "What is stable" in docs/python.md, '
        "run `.venv/bin/python docs/python_api.py`, commit docs/python-api.txt, and tell it in CHANGELOG.md"
    )

"""Marks the tests of this folder, so that they can be chosen together with those of others."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them as ``deploy``."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deploy)

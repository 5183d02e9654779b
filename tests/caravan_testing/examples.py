"""How many random examples a test tries.

Tests that ask here have the marker `examples`, so that `make test-more` runs them with all examples.
"""

import os

# `make test-slow` and `make test-more` set it.
_ALL = os.environ.get("CARAVAN_TEST_EXAMPLES") == "all"
_PART = 10


def examples(count: int) -> int:
    """Return ``count`` in `make test-slow` and `make test-more`, and a part of it in `make test`."""
    return count if _ALL else count // _PART


def places(count: int) -> range:
    """Return all places below ``count`` in `make test-slow` and `make test-more`, and some of them in `make test`."""
    return range(0, count, 1 if _ALL else _PART)

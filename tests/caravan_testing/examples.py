"""How many random examples a test tries."""

import os

# `make test-slow` and `make test-more` set it.
_ALL = os.environ.get("CARAVAN_TEST_EXAMPLES") == "all"
_PART = 5


def examples(count: int) -> int:
    """Return ``count`` in `make test-slow` and `make test-more`, and a part of it in `make test`."""
    return count if _ALL else count // _PART

"""How many random examples a test tries."""

import os

# `make test-slow` and `make test-all` set it.
_ALL = os.environ.get("CARAVAN_TEST_EXAMPLES") == "all"
_PART = 5


def examples(count: int) -> int:
    """Return ``count`` in `make test-slow` and in `make test-all`, which CI runs, and a part of it in `make test`."""
    return count if _ALL else count // _PART

"""Compares runs of tokens."""

from typing import TypeVar

Run = TypeVar("Run", list[int], tuple[int, ...])


def common_length(a: Run, b: Run, known: int = 0) -> int:
    """Return how many first tokens of ``a`` and ``b`` are equal; the first ``known`` are."""
    if a == b:  # which copies nothing
        return len(a)
    low, high = known, min(len(a), len(b)) + 1  # the first `low` are equal, the first `high` are not
    middle = high - 1  # mostly one is a prefix of the other
    while high - low > 1:
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
        middle = (low + high) // 2
    return low

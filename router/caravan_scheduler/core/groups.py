"""Parts items into groups that are small enough for a call each."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Most:
    """What a group may have: ``items``, and ``size`` of all of them together."""

    items: int
    size: int


def grouped(items: Iterable[T], most: Most, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in groups, in order. A group that is larger than ``most`` has one item."""
    together: list[T] = []
    size = 0
    for item in items:
        added = size_of(item)
        if together and (len(together) == most.items or size + added > most.size):
            yield together
            together, size = [], 0
        together.append(item)
        size += added
    if together:
        yield together

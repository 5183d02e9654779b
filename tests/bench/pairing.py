"""The order in which servers are loaded, and the ratios of loads that were neighbours in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def turns(ours: T, peers: Sequence[T], round_number: int) -> list[list[T]]:
    """Return the loads of a round in their order, in groups in which ours is next to every peer.

    Every other round runs backwards: with one peer, the order is A B B A A B.
    """
    groups = [[ours, *peers]]
    if len(peers) > 1:
        groups = [[pair[0], ours, *pair[1:]] for pair in (peers[at : at + 2] for at in range(0, len(peers), 2))]
    return groups if round_number % 2 == 0 else [group[::-1] for group in reversed(groups)]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and the lowest and the highest of them."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of ``values``; None if there are none."""
    return Spread(median(values), min(values), max(values)) if values else None


def ratios(pairs: Sequence[tuple[float | None, float | None]]) -> list[float]:
    """Return the first value of each pair divided by the second, without pairs that lack one."""
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]

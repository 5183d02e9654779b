"""Counters, gauges and histograms that cost under a microsecond to touch, and their text exposition.

prometheus_client's own take a lock and scan the buckets at each observation, and its exposition appends ``_total`` to
the names of counters, which TGI's do not have. These belong to one event loop: no locks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence


class Value:
    """A counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def samples(self, name: str, labels: str) -> Iterator[str]:
        yield f"{name}{_braces(labels)} {_number(self.value)}\n"


class Histogram:
    """Counts per bucket (not cumulative while stored) and the sum; without bounds it is a summary."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def samples(self, name: str, labels: str) -> Iterator[str]:
        cumulative = 0
        separator = "," if labels else ""
        if self._bounds:
            for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
                cumulative += count
                yield f'{name}_bucket{{{labels}{separator}le="{_number(bound)}"}} {cumulative}\n'
        yield f"{name}_sum{_braces(labels)} {_number(self._sum)}\n"
        yield f"{name}_count{_braces(labels)} {self.count}\n"


def label_text(names: Iterable[str], values: Iterable[str]) -> str:
    """``a="x",b="y"``, escaped."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)

"""Counters, gauges and histograms that cost less than a microsecond per observation, and their text exposition.

prometheus_client takes a lock and scans the buckets at each observation, and appends ``_total`` to the names of
counters, which TGI's names do not have. These instruments take no lock: use them on one event loop only.
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
    """The count of each bucket, not cumulative while stored, and the sum. Without bounds it has no buckets."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

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
    """Return ``a="x",b="y"`` with escaped values."""
    return ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _braces(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)

"""Counters, gauges and histograms, and their text in Prometheus' format and in OpenMetrics."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from caravan_router.metrics.table import Alias, Kind, MetricSpec

_TOTAL = "_total"
_OPENMETRICS = "application/openmetrics-text"


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format of a reply. ``encode``: prometheus_client's function for it, whose text comes last."""

    content_type: str
    encode: Callable[[Collector], bytes]

    @classmethod
    def accepted(cls, accept: str = "") -> "TextFormat":
        """Return the format for the header `Accept`: OpenMetrics if it names it, else Prometheus' text format."""
        encode, content_type = choose_encoder(accept)
        return cls(content_type, encode)

    @property
    def is_openmetrics(self) -> bool:
        return self.content_type.startswith(_OPENMETRICS)

    def head(self, name: str, kind: Kind, text: str) -> str:
        """Return the lines before the samples of ``name``.

        In OpenMetrics, the name of a counter is that of its samples without `_total`. A counter whose samples have no
        `_total`, such as TGI's, has an unknown type there, so that its name is the same in both formats.
        """
        shown = kind.value
        if self.is_openmetrics and kind is Kind.COUNTER:
            shown = shown if name.endswith(_TOTAL) else "unknown"
            name = name.removesuffix(_TOTAL)
        return f"# HELP {name} {text}\n# TYPE {name} {shown}\n"


PROMETHEUS = TextFormat.accepted()


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
    """The count of each bucket, not cumulative while stored, and the sum."""

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


class Family:
    """A metric with an instrument for each set of label values, of which the last is the model if it is of models."""

    __slots__ = ("_children", "spec")

    def __init__(self, spec: MetricSpec) -> None:
        self.spec = spec
        self._children: dict[tuple[str, ...], Value | Histogram] = {}

    def value(self, *labels: str) -> Value:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = Value()
        assert isinstance(child, Value), self.spec.name
        return child

    def histogram(self, *labels: str) -> Histogram:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = Histogram(self.spec.bounds)
        assert isinstance(child, Histogram), self.spec.name
        return child

    def forget(self, label: str, position: int) -> None:
        """Remove the series that have this label value at this position; -1 is that of the model."""
        for labels in [labels for labels in self._children if labels[position] == label]:
            del self._children[labels]

    def text(self, form: TextFormat) -> str:
        head = form.head(self.spec.name, self.spec.kind, self.spec.help)
        return head + _samples(self.spec.name, self.spec.all_labels, self._children)

    def alias(self, alias: Alias, form: TextFormat) -> str:
        """Return the series under another name."""
        children = self._children
        if alias.known_models_only:
            children = {labels: child for labels, child in children.items() if labels[-1]}
        names = self.spec.labels if alias.labels is None else alias.labels
        if len(names) < len(self.spec.labels):
            children = _summed(children)
        head = form.head(alias.name, self.spec.kind, alias.help or self.spec.help)
        return head + _samples(alias.name, (*names, alias.model_label), children)


def _summed(children: Mapping[tuple[str, ...], Value | Histogram]) -> dict[tuple[str, ...], Value | Histogram]:
    """Return one value for each model, the sum of its series."""
    sums: dict[tuple[str, ...], Value | Histogram] = {}
    for labels, child in children.items():
        total = sums.setdefault(labels[-1:], Value())
        assert isinstance(child, Value)
        assert isinstance(total, Value)
        total.add(child.value)
    return sums


def _samples(name: str, names: Sequence[str], children: Mapping[tuple[str, ...], Value | Histogram]) -> str:
    lines: list[str] = []
    for labels, child in children.items():
        lines.extend(child.samples(name, label_text(names, labels)))
    return "".join(lines)

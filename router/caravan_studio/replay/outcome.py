"""What clients have seen, recorded or in virtual time, and tables of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HEADS = ("requests", "answered", "failed", "tokens", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Times are seconds, each the median and the 99th percentile; None if there is none.

    ``tokens_s``: tokens a second from the first arrival to the last token.
    """

    requests: int
    answered: int
    failed: int
    tokens: int
    tokens_s: float
    ttft_s: tuple[float, float] | None
    itl_s: tuple[float, float] | None


class Outcome:
    """Notes when requests arrive and get tokens, on one clock."""

    def __init__(self) -> None:
        self._arrived_s: dict[int, float] = {}
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        # Times between tokens, each with the number of tokens that came so.
        self._gaps: list[tuple[float, int]] = []
        self._failed: set[int] = set()
        self.tokens = 0

    def ask(self, request: int, at_s: float) -> None:
        """Note a request."""
        self._arrived_s[request] = at_s

    def hear(self, request: int, tokens: int, at_s: float) -> None:
        """Note ``tokens`` of a request, which came together."""
        if request not in self._arrived_s or not tokens:
            return
        self.tokens += tokens
        if request in self._last_s:
            self._gaps.append(((at_s - self._last_s[request]) / tokens, tokens))
        else:
            self._first_s[request] = at_s
        self._last_s[request] = at_s

    def fail(self, request: int) -> None:
        """Note that a request has failed."""
        if request in self._arrived_s:
            self._failed.add(request)

    def figures(self) -> Figures:
        """Return the figures of all requests."""
        waits = [(at_s - self._arrived_s[request], 1) for request, at_s in self._first_s.items()]
        span_s = max(self._last_s.values(), default=0.0) - min(self._arrived_s.values(), default=0.0)
        return Figures(
            requests=len(self._arrived_s),
            answered=len(self._first_s),
            failed=len(self._failed),
            tokens=self.tokens,
            tokens_s=self.tokens / span_s if span_s > 0 else 0.0,
            ttft_s=_quantiles(waits),
            itl_s=_quantiles(self._gaps),
        )


def _quantiles(weighted: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    if not weighted:
        return None
    ordered = sorted(weighted)
    total = sum(weight for _, weight in ordered)
    return _quantile(ordered, 0.5 * total), _quantile(ordered, 0.99 * total)


def _quantile(ordered: Sequence[tuple[float, int]], below: float) -> float:
    seen = 0
    for value, weight in ordered:
        seen += weight
        if seen >= below:
            return value
    return ordered[-1][0]


def table(title: str, rows: Mapping[str, Figures]) -> str:
    """Return a table with a line for each of ``rows``."""
    cells = [[title, *_HEADS], *([name, *_cells(figures)] for name, figures in rows.items())]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for name, *numbers in cells:
        padded = [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "".join(f"{line}\n" for line in lines)


def _cells(figures: Figures) -> list[str]:
    ttft, itl = figures.ttft_s, figures.itl_s
    return [
        str(figures.requests),
        str(figures.answered),
        str(figures.failed),
        str(figures.tokens),
        f"{figures.tokens_s:.1f}",
        *(["-", "-"] if ttft is None else [f"{1000 * seconds:.0f} ms" for seconds in ttft]),
        *(["-", "-"] if itl is None else [f"{1000 * seconds:.1f} ms" for seconds in itl]),
    ]

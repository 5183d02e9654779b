"""Prints figures beside each other."""

from collections.abc import Mapping

from caravan_studio.replay.outcome import Figures

_HEADS = ("requests", "answered", "failed", "tokens", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99")


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

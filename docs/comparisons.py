"""Tables and charts of the comparisons with llama-server that `bench.keep` has kept in docs/figures/."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parent / "figures"
CHARTS = Path(__file__).resolve().parent / "charts"

# What a picture has: of rates, higher ones are better; of times, lower ones.
GROUPS = ("rates", "times")
_RATE = "tokens/s"

# In units of the picture, which scales.
_WIDTH = 800
_LABEL_WIDTH = 370
_BAR = 11
_GAP = 9
_TOP = 46
_RIGHT = 60
_COLOURS = ("#2f6fde", "#d9822b", "#3a9d5d")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.grid{stroke:#ccc}.one{stroke:#222;stroke-width:1.5}"
    ".range{stroke:#222;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.one,.range{stroke:#ddd}}"
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of a kept comparison, by the work they measure and then by model."""

    models: tuple[str, ...]
    rows: dict[str, dict[str, dict[str, Any]]]

    def of(self, group: str) -> "Comparison":
        """Return the works whose figures are rates, or else those whose figures are times."""
        is_rate = group == "rates"
        rows = {work: by_model for work, by_model in self.rows.items() if work.endswith(_RATE) == is_rate}
        return Comparison(self.models, rows)

    @classmethod
    def read(cls, name: str) -> "Comparison":
        """Return what `bench.keep` kept as ``name``."""
        kept = json.loads((FIGURES / f"{name}.json").read_text())["rows"]
        rows: dict[str, dict[str, dict[str, Any]]] = {}
        for row in kept:
            rows.setdefault(row["work"], {})[row["model"]] = row
        return cls(tuple(dict.fromkeys(row["model"] for row in kept)), rows)


def head(name: str) -> tuple[str, ...]:
    """Return the columns of `table_rows`."""
    models = Comparison.read(name).models
    return ("work", *(f"{model}: {what}" for model in models for what in ("Caravan", "llama-server", "ratio")))


def table_rows(name: str) -> list[tuple[str, ...]]:
    """Return a row for each work: for each model our figure, that of llama-server's better layout, and the ratio."""
    found = Comparison.read(name)
    return [
        (work, *(cell for model in found.models for cell in _cells(by_model.get(model))))
        for work, by_model in found.rows.items()
    ]


def _cells(row: dict[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return ("", "", "")
    ratio = row["ratio"]
    shown = f"{ratio['median']:.2f}"
    if row["rounds"] > 1:
        shown += f" ({ratio['low']:.2f}\u2013{ratio['high']:.2f})"
    return (_amount(row["ours"]), _amount(row["theirs"]), shown)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def chart(name: str, group: str) -> str | None:
    """Return an SVG picture: a bar for each work and model, as long as Caravan's part of llama-server's figure.

    It has the works of a ``group`` of `GROUPS`; None if there are none. The scale is logarithmic, and bars begin at 1.
    A thin line goes from the lowest to the highest ratio.
    """
    found = Comparison.read(name).of(group)
    if not found.rows:
        return None
    ratios = [row["ratio"] for by_model in found.rows.values() for row in by_model.values()]
    low = math.floor(min(-1.0, *(math.log2(ratio["low"]) for ratio in ratios)))
    high = math.ceil(max(1.0, *(math.log2(ratio["high"]) for ratio in ratios)))
    width = _WIDTH - _LABEL_WIDTH - _RIGHT

    def x(ratio: float) -> float:
        return round(_LABEL_WIDTH + width * (math.log2(ratio) - low) / (high - low), 1)

    row_height = len(found.models) * _BAR + _GAP
    height = _TOP + len(found.rows) * row_height + 8
    parts = [_legend(found.models)]
    for power in range(low, high + 1):
        at = x(2.0**power)
        kind = "grid" if power else "one"
        parts.append(f'<line class="{kind}" x1="{at}" y1="{_TOP - 6}" x2="{at}" y2="{height - 6}"/>')
        scale = f"1/{2**-power}" if power < 0 else f"{2**power}"
        parts.append(f'<text x="{at}" y="{_TOP - 12}" text-anchor="middle">{scale}</text>')
    for place, (work, by_model) in enumerate(found.rows.items()):
        top = _TOP + place * row_height
        middle = top + len(found.models) * _BAR / 2 + 4
        label = escape(work.removesuffix(_RATE).rstrip(": ").replace("`", ""))
        parts.append(f'<text x="{_LABEL_WIDTH - 8}" y="{middle:g}" text-anchor="end">{label}</text>')
        for index, model in enumerate(found.models):
            row = by_model.get(model)
            if row is not None:
                parts += _bar(row["ratio"], x, top + index * _BAR, _COLOURS[index % len(_COLOURS)])
    title = f"Caravan's figures as multiples of llama-server's: {name}, {group}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _bar(ratio: dict[str, float], x: Callable[[float], float], top: float, colour: str) -> list[str]:
    start, end = sorted((x(1.0), x(ratio["median"])))
    middle, after = top + _BAR / 2 - 1, max(x(1.0), x(ratio["high"])) + 4
    return [
        f'<rect x="{start}" y="{top}" width="{max(1.0, round(end - start, 1))}" height="{_BAR - 2}" fill="{colour}"/>',
        f'<line class="range" x1="{x(ratio["low"])}" y1="{middle}" x2="{x(ratio["high"])}" y2="{middle}"/>',
        f'<text x="{after:g}" y="{top + _BAR - 2}">{ratio["median"]:.2f}</text>',
    ]


def _legend(models: tuple[str, ...]) -> str:
    parts = []
    for place, model in enumerate(models):
        left = _LABEL_WIDTH + place * 150
        parts.append(f'<rect x="{left}" y="6" width="10" height="10" fill="{_COLOURS[place % len(_COLOURS)]}"/>')
        parts.append(f'<text x="{left + 15}" y="15">{escape(model)}</text>')
    return "\n".join(parts)


def charts() -> dict[Path, str]:
    """Return every chart by its file: one for each group of each kept comparison."""
    names = [path.stem for path in sorted(FIGURES.glob("*.json"))]
    found = {CHARTS / f"{name}-{group}.svg": chart(name, group) for name in names for group in GROUPS}
    return {path: picture for path, picture in found.items() if picture is not None}

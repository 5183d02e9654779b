"""Builds the table: medians over the rounds, and the ratio of each product's better layout."""

from dataclasses import dataclass
from statistics import median

from bench.batched_bench import EngineRate
from bench.rows import Better, Figure, Group, Report
from bench.servers import Contender, Product

Results = dict[tuple[str, Contender], list[dict[str, Report]]]


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of every contender; None if a contender has none."""

    label: str
    values: dict[Contender, float | None]
    better: Better

    @property
    def ratio(self) -> float | None:
        """The figure of Caravan's better layout divided by that of llama-server's better layout."""
        best = {product: self._best(product) for product in Product}
        ours, theirs = best[Product.CARAVAN], best[Product.LLAMA_SERVER]
        return ours / theirs if ours is not None and theirs else None

    def _best(self, product: Product) -> float | None:
        values = [value for who, value in self.values.items() if who.product is product and value is not None]
        if not values:
            return None
        return max(values) if self.better is Better.HIGHER else min(values)


def lines(groups: tuple[Group, ...], contenders: tuple[Contender, ...], results: Results) -> list[Line]:
    """Return the lines in the order of the groups, without those that have no figure at all."""
    found: list[Line] = []
    for group in groups:
        for run in group.runs:
            for figure in run.figures:
                values = {who: _median(figure, run.name, results.get((group.name, who), [])) for who in contenders}
                if any(value is not None for value in values.values()):
                    found.append(Line(f"{figure.label} ({group.name})", values, figure.better))
    return found


def _median(figure: Figure, run: str, rounds: list[dict[str, Report]]) -> float | None:
    values = [figure.read(reports[run]) for reports in rounds if run in reports]
    known = [value for value in values if value is not None]
    return median(known) if known else None


def engine_lines(rates: list[EngineRate], found: list[Line], contenders: tuple[Contender, ...]) -> list[Line]:
    """Return each contender's steady decode rate in percent of the bare engine's, at equal batch size and layout."""
    shares: list[Line] = []
    for batch in sorted({rate.batch for rate in rates}):
        served = next((line for line in found if line.label.startswith(f"decode, {batch} streams")), None)
        values: dict[Contender, float | None] = {}
        for who in contenders:
            bare = [r.decode_tokens_per_s for r in rates if r.batch == batch and r.layout is who.layout]
            rate = served.values[who] if served is not None else None
            values[who] = 100 * rate / median(bare) if rate is not None and bare else None
        if any(value is not None for value in values.values()):
            shares.append(Line(f"decode, {batch} streams: % of llama-batched-bench", values, Better.HIGHER))
    return shares


def markdown(all_lines: list[Line], contenders: tuple[Contender, ...], rates: list[EngineRate], caption: str) -> str:
    """Return the table in Markdown, ready for docs/performance.md."""
    rows = [
        "| | " + " | ".join(str(who) for who in contenders) + " | ratio |",
        "|---|" + "---:|" * (len(contenders) + 1),
    ]
    for line in all_lines:
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        rows.append(f"| {line.label} | " + " | ".join(_cell(line.values[who]) for who in contenders) + f" | {ratio} |")
    rows += ["", "Bare engine (llama-batched-bench), decode tokens/s:", "", "| sequences | layout | tokens/s |"]
    rows += ["|---:|---|---:|"]
    for batch, layout in sorted({(rate.batch, rate.layout) for rate in rates}):
        values = [r.decode_tokens_per_s for r in rates if r.batch == batch and r.layout is layout]
        rows.append(f"| {batch} | {layout} | {median(values):.1f} |")
    return "\n".join([caption, "", *rows, ""])


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"

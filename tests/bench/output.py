"""Writes the results: a table in Markdown, and everything that was measured as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.summary import Line, RowResult, Spread, summarise

_HEAD = ("work", "Caravan", "compared with", "ratio (lowest to highest)", "bound", "share of bound")


def table(results: Sequence[RowResult]) -> str:
    """Return the table of one model."""
    lines = [line for result in results for line in summarise(result)]
    rows = [_HEAD, ("---", *["---:"] * (len(_HEAD) - 1)), *map(_cells, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def disturbance(results: Sequence[RowResult]) -> str:
    """Return how much CPU time was used by others than the loaded servers, without rows that have busy neighbours."""
    rounds = [round_ for result in results if not result.row.busy for round_ in result.rounds]
    loads = [load for round_ in rounds for group in round_.groups for load in group.values()]
    idle = max((load.idle_share for load in loads), default=0.0)
    others = sorted(load.others_share for load in loads) or [0.0]
    return (
        f"Servers that were not loaded used at most {idle:.1%} of a core together. Processes that do not belong to the "
        f"comparison used {others[len(others) // 2]:.0%} of the machine in the median, and at most {others[-1]:.0%}."
    )


def document(results: Sequence[RowResult]) -> list[dict[str, Any]]:
    """Return all rows of one model with their rounds, for JSON."""
    return [
        {
            "row": result.row.name,
            "arguments": result.row.arguments,
            "servers": [asdict(contender) for contender in (result.lineup.ours, *result.lineup.peers)],
            "lines": [asdict(line) for line in summarise(result)],
            "rounds": [
                {
                    "groups": [{name: asdict(load) for name, load in group.items()} for group in round_.groups],
                    "engine": [
                        {"flash_attention": attention.value} | asdict(run) | asdict(time)
                        for attention, times in round_.engine.items()
                        for run, time in times.items()
                    ],
                }
                for round_ in result.rounds
            ],
        }
        for result in results
    ]


def write(stem: Path, caption: dict[str, Any], models: dict[str, list[RowResult]]) -> None:
    """Write what is known so far to ``stem`` with the suffixes .md and .json."""
    text = [", ".join(f"{name}: {value}" for name, value in caption.items())]
    for name, results in models.items():
        text += [f"## {name}", table(results), disturbance(results)]
    stem.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    whole = caption | {"models": {name: document(results) for name, results in models.items()}}
    stem.with_suffix(".json").write_text(json.dumps(whole, indent=1, default=str))


def _cells(line: Line) -> tuple[str, ...]:
    theirs = "" if line.theirs is None else f"{_median(line.theirs)} ({line.peer})"
    ratio = "" if line.ratio is None else f"{line.ratio.median:.2f} ({line.ratio.low:.2f} to {line.ratio.high:.2f})"
    share = "" if line.share is None else f"{line.share.median:.2f}"
    return (line.label, _median(line.ours), theirs, ratio, _median(line.bound) if line.bound else "", share)


def _median(found: Spread | None) -> str:
    if found is None:
        return "-"
    return f"{found.median:,.0f}" if found.median >= 1000 else f"{found.median:.1f}"

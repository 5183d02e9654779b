"""Keeps the results of a comparison for the documents: `python -m bench.keep NAME REPORT.json ...`

It writes docs/figures/NAME.json, of which `make docs` makes tables and charts. A row that several reports have is that
of the last one.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.contenders import Product
from bench.paths import ROOT
from bench.rows import PROFILES, Row

FIGURES = ROOT / "docs" / "figures"


def keep(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the lines of ``reports``, JSON that `bench.output.write` wrote, with the conditions of each row.

    Figures that do not compare with llama-server's are left out.
    """
    order = [row.name for profile in PROFILES.values() for row in profile.rows if _is_with_peer(row)]
    rows = {}
    for report in reports:
        for model, results in report["models"].items():
            for result in results:
                for line in result["lines"] if result["row"] in order else ():
                    if line["ratio"] is not None:
                        rows[(model, line["label"])] = _row(report, model, result["row"], line)
    return {
        "machine": reports[-1]["machine"],
        "threads": reports[-1]["threads"],
        "llama-cpp-python": reports[-1]["llama-cpp-python"],
        "rows": sorted(rows.values(), key=lambda row: order.index(row["row"])),
    }


def _is_with_peer(row: Row) -> bool:
    return all(peer.product is Product.LLAMA_SERVER for peer in row.lineup.peers)


def _row(report: dict[str, Any], model: str, row: str, line: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model,
        "row": row,
        "work": line["label"],
        "rounds": report["rounds"],
        "ours": _digits(line["ours"]["median"]),
        "peer": line["peer"],
        "theirs": _digits(line["theirs"]["median"]),
        "ratio": {key: round(value, 3) for key, value in line["ratio"].items()},
        "share": line["share"] and round(line["share"]["median"], 3),
    }


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def main(arguments: Sequence[str]) -> int:
    """Write the file of the first argument from the reports that follow."""
    name, *paths = arguments
    kept = keep([json.loads(Path(path).read_text()) for path in paths])
    FIGURES.mkdir(exist_ok=True)
    (FIGURES / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The table of tool calls that Caravan and llama-server read, which `bench.tool_calls` has counted."""

import json
from pathlib import Path

KEPT = Path(__file__).resolve().parent / "tool_calls.json"
HEAD = ("template in llama.cpp's archive", "Caravan", "llama-server", "not read")
_SERVERS = ("Caravan", "llama-server")


def table_rows() -> list[tuple[str, ...]]:
    """Return the sums, and a row for each template of which a server did not read every case."""
    found: dict[str, dict[str, list[bool]]] = json.loads(KEPT.read_text())
    shown = {template: cases for template, cases in found.items() if cases}
    rows = [
        _row(f"all {len(shown)} that write calls", [each for cases in shown.values() for each in cases.values()], "")
    ]
    for template, cases in shown.items():
        missed = [
            f"{server}: {', '.join(names)}"
            for place, server in enumerate(_SERVERS)
            if (names := [case for case, read in cases.items() if not read[place]])
        ]
        if missed:
            rows.append(_row(f"`{template}`", [*cases.values()], "; ".join(missed)))
    return rows


def _row(name: str, cases: list[list[bool]], missed: str) -> tuple[str, ...]:
    sums = (sum(read[place] for read in cases) for place in range(len(_SERVERS)))
    return (name, *(f"{count} of {len(cases)}" for count in sums), missed)

"""Measures what four streams notice of a long prompt, beside llama-server."""

import sys
from dataclasses import replace

from bench.measure import Plan, measure
from bench.rows import MAIN_ROWS
from gpu.kit.job import Job, keep, kept, run_stage
from gpu.kit.models import MEASURED
from gpu.kit.rows import DEFAULT, common, lines, lineup, profile

_SLOTS, _WORDS, _CELLS = 8, 6000, 8 * 12_288
_SMALL_WORDS = 600
_UNIT_S = 120.0


def run(job: Job) -> None:
    """Measure the models that have not been measured yet."""
    (row,) = (each for each in MAIN_ROWS if each.name == "stall")
    words = _SMALL_WORDS if job.rehearsal else _WORDS
    row = replace(
        row,
        title=f"{words:,} words land on 4 streams",
        lineup=lineup(_SLOTS, _CELLS, (DEFAULT,)),
        arguments=(*row.arguments, "--words", str(words)),
    )
    for name in MEASURED:
        if name in kept("stall"):
            continue
        job.need(_UNIT_S)
        plan = Plan(rows=(row,), profile=profile(job, (row,)), peers=None, seed=0)
        *_, results = measure(plan, common(job, name))
        keep("stall", name, {"model": name, "lines": [line for result in results for line in lines(result)]})


if __name__ == "__main__":
    sys.exit(run_stage(run))

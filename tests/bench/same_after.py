"""Counts the greedy answers that equal those computed from the start, whatever happened before. Not run by the tests.

``PYTHONPATH=tests python -m bench.same_after FAMILY ...``: for each family of memory, has random conversations with two
shards with ``--exact``, and compares each answer, token by token, with that of a server that computes its whole prompt
alone. Prints a row of a table for each.
"""

import argparse
import tempfile
from pathlib import Path

from caravan_testing.history_runs import Counts, had
from caravan_testing.memory_families import FAMILIES

_KINDS = ("next turn", "fork", "rewind", "edit", "restart", "move", "preemption", "lost shard")


def main() -> None:
    """Measure all rows and print each as soon as it is known."""
    parser = argparse.ArgumentParser(prog="same_after", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"by default all: {', '.join(FAMILIES)}")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flags", default="", help="more flags of the server, such as '--speculate 4'")
    given = parser.parse_args()
    if unknown := sorted({*given.families} - FAMILIES.keys()):
        parser.error(f"no family {unknown[0]!r}")
    print(f"| memory | same | {' | '.join(_KINDS)} | preempted, lost | cached |")
    print(f"|---|{'---:|' * (len(_KINDS) + 3)}")
    for name in given.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            counts = had(
                FAMILIES[name](), Path(folder), answers=given.answers, seed=given.seed, flags=given.flags.split()
            )
        print(_row(name, counts), flush=True)


def _row(name: str, counts: Counts) -> str:
    kinds = " | ".join(f"{counts.same[kind]} of {counts.answers[kind]}" for kind in _KINDS)
    preempted, lost = counts.metrics["caravan_preemptions"], counts.metrics["caravan_shard_losses_total"]
    cached = f"{counts.cached_tokens / counts.prompt_tokens:.0%}"
    return f"| {name} | {counts.same.total()} of {counts.answers.total()} | {kinds} | {preempted}, {lost} | {cached} |"


if __name__ == "__main__":
    main()

"""What each stage is told, and how it tells how it ended."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu.kit.places import RESULTS, KitError, UnfinishedError

# The status of a stage that goes on when it is started again; EX_TEMPFAIL of sysexits.h.
UNFINISHED = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """``rehearsal``: on the CPU, with small models. ``until``: the time since the epoch at which the stage must end."""

    rehearsal: bool
    until: float

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.time()

    def need(self, seconds: float) -> None:
        """Raise UnfinishedError if fewer than ``seconds`` are left."""
        if self.left_s() < seconds:
            message = f"{max(0.0, self.left_s()):.0f} s are left, and what comes next takes about {seconds:.0f} s"
            raise UnfinishedError(message)

    def flags(self) -> list[str]:
        """Return the flags from which `run_stage` makes this job again."""
        return ["--until", f"{self.until}", *(["--rehearsal"] if self.rehearsal else [])]


def run_stage(run: Callable[[Job], None]) -> int:
    """Run the stage of a module with the job of its flags; return the status to exit with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--until", type=float, default=time.time() + 3600)
    given = parser.parse_args()
    try:
        run(Job(rehearsal=given.rehearsal, until=given.until))
    except UnfinishedError as error:
        print(f"not finished: {error}", flush=True)
        return UNFINISHED
    except KitError as error:
        print(f"failed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def keep(kind: str, name: str, result: dict[str, Any]) -> None:
    """Keep a result for the report, and so that a stage that goes on does not make it again."""
    folder = RESULTS / kind
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.with_suffix(".unfinished").write_text(json.dumps(result, indent=1))
    path.with_suffix(".unfinished").rename(path)


def kept(kind: str) -> dict[str, dict[str, Any]]:
    """Return all results of a kind, by their names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / kind).glob("*.json"))}

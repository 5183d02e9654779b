"""The stages in their order, and how one is run: as a process of its own, with its time and its end in the records."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TextIO

from gpu.kit.job import PYTHON, RESULTS, ROOT, UNFINISHED, Job

_RECORDS = RESULTS / "stages.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """``before``: it runs on the host's Python, before the environment is there. ``needed``: the others need it."""

    name: str
    what: str
    before: bool = False
    needed: bool = False


STAGES = (
    Stage(name="install", what="an environment of the wheels that were carried", before=True, needed=True),
    Stage(name="build", what="llama.cpp for the card, as library and as programs", before=True, needed=True),
    Stage(name="models", what="models with random weights", needed=True),
    Stage(name="tests", what="the tests of the backend and of the server"),
    Stage(name="device_sampling", what="draws from candidates of the device and from all logits"),
    Stage(name="rows", what="pairs with llama-server at 1, 8 and 32 streams"),
    Stage(name="bound", what="the bare engine, by llama-batched-bench"),
    Stage(name="stall", what="a long prompt that lands on 4 streams"),
    Stage(name="between", what="what is between two passes of 32 streams"),
)


class End(StrEnum):
    """How a stage has ended."""

    DONE = "done"
    FAILED = "failed"
    UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Of one stage: the seconds of all its ``runs`` together, and how the last one ended."""

    seconds: float
    runs: int
    end: End


def records() -> dict[str, Record]:
    """Return the records of the stages that have run, by their names."""
    if not _RECORDS.is_file():
        return {}
    found = json.loads(_RECORDS.read_text())
    return {name: Record(**{**record, "end": End(record["end"])}) for name, record in found.items()}


def run(stage: Stage, job: Job, log: TextIO) -> End:
    """Run a stage with its output on the screen and in ``log``, and record it."""
    _say(log, f"==> {stage.name}: {stage.what}")
    started = time.monotonic()
    python = sys.executable if stage.before else str(PYTHON)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTHONUNBUFFERED": "1"}
    command = [python, "-m", f"gpu.kit.{stage.name}", *job.flags()]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            _say(log, line.rstrip("\n"))
    end = {0: End.DONE, UNFINISHED: End.UNFINISHED}.get(process.returncode, End.FAILED)
    seconds = time.monotonic() - started
    _say(log, f"==> {stage.name}: {end} after {seconds:.0f} s")
    _record(stage.name, seconds, end)
    return end


def _record(name: str, seconds: float, end: End) -> None:
    known = records()
    goes_on = name in known and known[name].end is End.UNFINISHED
    before = known[name] if goes_on else Record(seconds=0.0, runs=0, end=end)
    known[name] = Record(seconds=round(before.seconds + seconds, 1), runs=before.runs + 1, end=end)
    _RECORDS.write_text(json.dumps({name: asdict(record) for name, record in known.items()}, indent=1))


def _say(log: TextIO, line: str) -> None:
    print(line, flush=True)
    print(line, file=log, flush=True)

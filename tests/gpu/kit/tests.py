"""Runs the tests of the card, of the backend and of the server, on the model that the kit has made for them."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from gpu.kit.job import ROOT, WORK, Job, KitError, keep, kept, run_stage
from gpu.kit.models import FOR_TESTS, model_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """``files`` of tests, and what pytest is told beside them. ``seconds``: about what they take."""

    name: str
    files: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    seconds: float = 120.0
    needs_card: bool = False


# The logits of random weights spread three times as far as those of the real model, and their rounding with them: 0.97
# was seen on an H100.
_TIE_LOGITS = "2.0"
# Parts of the names of tests on other models, and of those that this model cannot pass.
_LEFT_OUT = ("window", "gemma", "plain", "words", "eos", "stop_tokens", "scores_small")
GROUPS = (
    Group(name="card", files=("tests/gpu/test_gpu.py",), arguments=("-m", "gpu"), needs_card=True),
    Group(
        name="backend",
        files=(
            "tests/model/test_llama_backend.py",
            "tests/model/test_prefixes.py",
            "tests/model/test_layouts.py",
            "tests/model/test_prompt_logprobs.py",
        ),
        # The kit's model stands for the demo model, most of whose cases are slow on CPUs. The model with a window does
        # not travel, and the small ones are for CPUs: how GPUs round them was not measured. Of random weights, no text
        # ends by itself; of other sizes, the scores of attention take other amounts of memory.
        arguments=("-m", "model", "-k", f"not {' and not '.join(_LEFT_OUT)}"),
    ),
    Group(
        name="server",
        # Those that need no --exact, which needs CPUs.
        files=("tests/gpu/test_served.py",),
        arguments=("-m", "not slow"),
    ),
)


def run(job: Job) -> None:
    """Run the groups that have not been run yet. Raises KitError if a test of any group has failed."""
    for group in GROUPS:
        if group.name in kept("tests") or (group.needs_card and job.rehearsal):
            continue
        job.need(group.seconds)
        _run_group(group, job)
    failed = [name for result in kept("tests").values() for name in result["failed"]]
    if failed:
        message = f"{len(failed)} tests failed: {', '.join(failed)}"
        raise KitError(message)


def _run_group(group: Group, job: Job) -> None:
    report = WORK / f"tests-{group.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *group.files, *group.arguments, f"--junitxml={report}"]
    environment = {
        **os.environ,
        "CARAVAN_TEST_MODEL": str(model_file(FOR_TESTS)),
        "CARAVAN_TEST_GPU_LAYERS": "0" if job.rehearsal else "-1",
        "CARAVAN_TEST_TIE_LOGITS": _TIE_LOGITS,
    }
    try:
        subprocess.run(command, cwd=ROOT, env=environment, timeout=job.left_s(), check=False)
    except subprocess.TimeoutExpired:
        print(f"{group.name}: stopped, since the time is over", flush=True)
    keep("tests", group.name, counted(report))


def counted(report: Path) -> dict[str, object]:
    """Return how many tests of pytest's report in XML passed and were skipped, and the names of those that failed."""
    if not report.is_file():
        return {"passed": 0, "skipped": 0, "failed": ["no report: pytest did not end"]}
    cases = list(ET.parse(report).iter("testcase"))
    failed = [
        str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(failed), "skipped": skipped, "failed": failed}


if __name__ == "__main__":
    sys.exit(run_stage(run))

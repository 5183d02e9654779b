"""Draws on the device beside those of the CPU, by the program `bench.device_sampling`, if the repository has it."""

import importlib.util
import subprocess
import sys

from bench.paths import ROOT
from gpu.kit.job import Job, keep, run_stage
from gpu.kit.models import FOR_TESTS, model_file
from gpu.kit.places import KitError

_PROGRAM = "bench.device_sampling"
_NEEDED_S = 60.0
_KEPT_CHARACTERS = 4000


def run(job: Job) -> None:
    """Run the program on the model of the tests."""
    if importlib.util.find_spec(_PROGRAM) is None:
        print(f"there is no {_PROGRAM} here")
        keep("device_sampling", FOR_TESTS, {"text": f"There is no `{_PROGRAM}` in this repository."})
        return
    job.need(_NEEDED_S)
    command = [sys.executable, "-m", _PROGRAM, str(model_file(FOR_TESTS))]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=job.left_s(),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{_PROGRAM} has not ended in the time that was left"
        raise KitError(message) from error
    print(done.stdout, flush=True)
    keep("device_sampling", FOR_TESTS, {"text": done.stdout[-_KEPT_CHARACTERS:]})
    if done.returncode != 0:
        message = f"{_PROGRAM} ended with {done.returncode}"
        raise KitError(message)


if __name__ == "__main__":
    sys.exit(run_stage(run))

"""Draws from candidates of the device beside draws from all logits, by the program `bench.device_sampling`."""

import subprocess
import sys

from bench.paths import ROOT
from gpu.kit.job import Job, KitError, keep, run_stage
from gpu.kit.models import FOR_TESTS, model_file

_PROGRAM = "bench.device_sampling"
_NEEDED_S = 60.0
_KEPT_CHARACTERS = 4000


def run(job: Job) -> None:
    """Run the program on the model of the tests."""
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

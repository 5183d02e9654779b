"""Makes the models."""

import sys
import time
from pathlib import Path

from gpu.kit.job import Job, keep, run_stage
from gpu.kit.places import MODELS, VOCABULARY
from gpu.kit.random_model import write_model
from gpu.kit.shapes import SHAPES, small

# For the tests; all others are measured.
FOR_TESTS = "demo"
MEASURED = tuple(name for name in SHAPES if name != FOR_TESTS)


def model_file(name: str) -> Path:
    """Return the file of a model in `SHAPES`, which this stage makes."""
    return MODELS / f"{name}.gguf"


def run(job: Job) -> None:
    """Write those that are missing."""
    MODELS.mkdir(parents=True, exist_ok=True)
    for name, shape in SHAPES.items():
        path = model_file(name)
        if path.is_file():
            continue
        job.need(30)
        started = time.monotonic()
        write_model(path, small(shape) if job.rehearsal else shape, VOCABULARY)
        seconds, gigabytes = time.monotonic() - started, path.stat().st_size / 1e9
        print(f"{path.name}: {gigabytes:.2f} GB in {seconds:.0f} s", flush=True)
        keep("models", name, {"gigabytes": round(gigabytes, 2), "seconds": round(seconds, 1)})


if __name__ == "__main__":
    sys.exit(run_stage(run))

"""Measures how long streams wait while a shard encodes pictures. Not run by the test suite.

``PYTHONPATH=tests python -m bench.beside_encoding``: one process with the demo model and a projector of ``--layers``
layers of the size of SigLIP's base model, which reads a picture as 256 patches. Four sequences decode; meanwhile a
thread encodes pictures one after another, with each of ``--nice``. Prints the times of the steps and of an encoding,
and the same steps with no encoding.
"""

import argparse
import os
import tempfile
import threading
from pathlib import Path
from time import perf_counter

import numpy as np

from bench.paths import DEMO_MODEL
from bench.picture_projector import SIDE, write_projector
from caravan_proto.messages.media import MediaKind, MediaShape
from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import ModelDriver

_SEQUENCES = 4


def main() -> None:
    """Measure and print one row for each niceness."""
    parser = argparse.ArgumentParser(prog="beside_encoding", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--nice", type=int, nargs="+", default=[0, 5, 10])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    print("| encoding | median step, ms | 95 % | longest | encoding, s |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        projector = Path(folder) / "mmproj.gguf"
        write_projector(projector, given.layers)
        driver = ModelDriver(
            DEMO_MODEL, ctx_size=8192, threads=given.threads, mmproj=str(projector), parallel=_SEQUENCES
        )
        _measure(driver, given.steps, None)
        for nice in (None, *given.nice):
            steps, encodings = _measure(driver, given.steps, nice)
            found = np.array(sorted(steps)) * 1e3
            named = "none" if nice is None else f"nice {nice}"
            seconds = f"{np.mean(encodings):.2f}" if encodings else ""
            row = f"{np.median(found):.1f} | {np.quantile(found, 0.95):.1f} | {found[-1]:.1f} | {seconds}"
            print(f"| {named} | {row} |", flush=True)
        driver.engine.close()


def _measure(driver: ModelDriver, count: int, nice: int | None) -> tuple[list[float], list[float]]:
    """Return the seconds of each step, and of each encoding beside them."""
    driver.engine.release_all()
    for sequence_id in range(_SEQUENCES):
        driver.prefill(first_chunk(sequence_id, range(100, 130), max_new=2 * count, ignore_eos=True))
    encodings: list[float] = []
    stopping = threading.Event()

    def encode() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, nice or 0)
        pixels = np.random.default_rng(0).integers(0, 256, 3 * SIDE * SIDE, dtype=np.uint8).tobytes()
        shape = MediaShape(media_id=b"picture", kind=MediaKind.IMAGE, width=SIDE, height=SIDE)
        while not stopping.is_set():
            began = perf_counter()
            driver.backend.media.encode(shape, pixels)
            encodings.append(perf_counter() - began)

    worker = threading.Thread(target=encode)
    if nice is not None:
        worker.start()
    steps = []
    for _ in range(count):
        began = perf_counter()
        driver.decode(range(_SEQUENCES), steps=1)
        steps.append(perf_counter() - began)
    stopping.set()
    if nice is not None:
        worker.join()
    return steps, encodings


if __name__ == "__main__":
    main()

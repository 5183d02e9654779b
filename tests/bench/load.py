"""Runs the load generator ``caravan bench`` against one server."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from bench.paths import BenchError

# The report of the load generator, as it writes it.
Report: TypeAlias = dict[str, Any]
_TIMEOUT_S = 3600


def load(url: str, arguments: Sequence[str], *, seed: int, counted: Sequence[int] = ()) -> Report:
    """Return the report of one load. It counts the CPU time of the processes ``counted``.

    The load generator has a process of its own, so that nothing else shares its interpreter.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "caravan_serve.bench", "--url", url, "--seed", str(seed), *arguments]
        command += ["--json", str(path)]
        for pid in counted:
            command += ["--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            message = f"the load has not ended within {_TIMEOUT_S} s: {' '.join(command)}"
            raise BenchError(message) from error
        if not path.is_file():
            message = f"the load failed: {(done.stdout + done.stderr).strip()[-500:]}"
            raise BenchError(message)
        report: Report = json.loads(path.read_text())
        return report


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Run ``count`` endless loops, each in a process of its own, until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()

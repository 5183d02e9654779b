"""A download that is killed at any byte continues where it was, and its count never goes backwards."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from caravan_models.fetching import read_answer, request_line
from caravan_models.progress import Progress
from caravan_models.reference import HubModel
from caravan_testing.serve_process import MODEL
from caravan_testing.small_gguf import small_gguf
from caravan_testing.stand_in_hub import StandInHub

pytestmark = pytest.mark.usefixtures("environment")

_DEADLINE_S = 120.0


@dataclass
class Attempts:
    """One download in many processes. ``kept``: bytes on the disk when each was killed; ``told``: all counts."""

    partial: Path
    kept: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    @property
    def here(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def kill_at(self, target: int) -> None:
        """Start a process and kill it as soon as ``target`` bytes are here."""
        with _worker() as process:
            deadline = time.monotonic() + _DEADLINE_S
            while self.here < target:
                assert process.poll() is None, "it ended before it was killed"
                assert time.monotonic() < deadline
                time.sleep(0.0005)
            process.send_signal(signal.SIGKILL)
            counts = self._counts(process)
        self.kept.append(self.here)
        # What was told of had been written.
        assert max(counts, default=0) <= self.here
        self.told += counts

    def finish(self) -> None:
        with _worker() as process:
            self.told += self._counts(process)
            assert process.wait() == 0

    @staticmethod
    def _counts(process: "subprocess.Popen[bytes]") -> list[int]:
        """Return the counts of bytes that the process tells until it ends."""
        assert process.stdout is not None
        counts = []
        for line in process.stdout:
            # The last line of a process that is killed may lack its end.
            if line.endswith(b"\n") and "progress" in json.loads(line):
                answer = read_answer(line)
                assert isinstance(answer, Progress)
                counts.append(answer.done)
        return counts


def _worker() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", "caravan_models.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(request_line(HubModel("demo/small")))
    process.stdin.flush()
    return process


def _check(hub: StandInHub, cache: Path, data: bytes, kills: int) -> None:
    """Kill a download of ``data`` so often, each time at a random byte, and let the last process end it."""
    sha256 = hashlib.sha256(data).hexdigest()
    hub.add("demo/small", {"small-Q4_0.gguf": data})
    attempts = Attempts(cache / "models--demo--small" / "blobs" / f"{sha256}.incomplete")
    for target in sorted(random.Random(kills).sample(range(1, len(data) * 9 // 10), kills)):
        attempts.kill_at(target)
    attempts.finish()
    # Each process that came to ask for bytes began with the first that was not here, so that none is sent twice but
    # those that were on their way.
    starts = [int(seen.headers["range"].removeprefix("bytes=").partition("-")[0]) for seen in hub.transfers]
    assert starts[0] == 0
    assert set(starts[1:]) <= set(attempts.kept)
    assert starts[-1] == attempts.kept[-1]
    assert attempts.told == sorted(attempts.told)
    [found] = (cache / "models--demo--small" / "snapshots").rglob("*.gguf")
    assert hashlib.sha256(found.read_bytes()).hexdigest() == sha256
    assert not attempts.partial.exists()


def test_a_download_that_is_killed_some_times_continues(hub: StandInHub, cache: Path) -> None:
    hub.faults.bytes_per_s = 8e6
    _check(hub, cache, small_gguf(3 << 20), kills=3)


@pytest.mark.slow
def test_a_model_whose_download_is_killed_at_fifty_random_bytes_is_whole(hub: StandInHub, cache: Path) -> None:
    hub.faults.bytes_per_s = 4e7
    _check(hub, cache, MODEL.read_bytes(), kills=50)

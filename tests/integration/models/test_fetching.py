"""A download is a process that tells its progress and may end at any time; the next one continues at its last byte."""

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from caravan_models.cache_layout import RepositoryCache
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.fetching import fetch, fetch_blocking, read_answer, request_line
from caravan_models.progress import Progress
from caravan_models.reference import HubModel
from caravan_testing.programs import children_with, command_line
from caravan_testing.serve_process import MODEL as DEMO_FILE
from caravan_testing.stand_in_hub import StandInHub, small_gguf
from caravan_testing.waiting import DEADLINE_S, eventually, wait_until

pytestmark = pytest.mark.usefixtures("environment")
MODEL = small_gguf(400_000)
SMALL = HubModel("demo/small")


def workers() -> list[int]:
    """The processes of downloads that this one has started."""
    return children_with("caravan_models.worker")


async def test_a_model_is_fetched_beside_other_work_and_its_progress_told(hub: StandInHub, cache: Path) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL, "mmproj-F16.gguf": small_gguf(seed=2)})
    hub.faults.cut_after = [100_000]
    progress: list[Progress] = []
    found = await fetch(SMALL, progress.append)
    assert found.model.read_bytes() == MODEL
    assert found.model.is_relative_to(cache)
    assert found.projector is not None
    assert [one.done for one in progress] == sorted(one.done for one in progress)
    assert (progress[0].file, progress[-1].file) == ("small-Q4_0.gguf", "mmproj-F16.gguf")
    assert progress[-1].done == found.size
    again: list[Progress] = []
    assert await asyncio.to_thread(fetch_blocking, SMALL, again.append) == found
    assert again == []


async def test_a_cancelled_download_ends_and_continues_later(hub: StandInHub, cache: Path) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.stall_after = [100_000]
    partial = RepositoryCache(cache, SMALL.repository).partial(hashlib.sha256(MODEL).hexdigest())
    fetching = asyncio.create_task(fetch(SMALL))
    await eventually(lambda: partial.exists() and partial.stat().st_size == 100_000)
    assert workers()
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert workers() == []
    hub.release_stalled()
    assert (await fetch(SMALL)).model.read_bytes() == MODEL
    assert hub.transfers[-1].headers["range"].startswith("bytes=100000-")


def kill_workers(_progress: Progress) -> None:
    for pid in workers():
        os.kill(pid, signal.SIGKILL)


async def test_a_failure_is_the_one_line_of_its_kind(hub: StandInHub) -> None:
    with pytest.raises(FetchError, match="has no repository demo/small, or it is private; check the name") as failed:
        await fetch(SMALL)
    assert failed.value.problem is FetchProblem.NO_REPOSITORY
    with pytest.raises(FetchError, match="has no repository demo/small"):
        await asyncio.to_thread(fetch_blocking, SMALL)
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.stall_after = [100_000]
    with pytest.raises(FetchError, match=r"ended with signal 9.*start it again, it continues") as killed:
        await fetch(SMALL, kill_workers)
    assert killed.value.problem is FetchProblem.BROKEN


def test_a_worker_whose_pipe_closes_at_once_is_a_failure_of_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop that the router has."""
    start = asyncio.create_subprocess_exec

    async def started(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **options)
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.sleep(0)  # in the loop's next turn the pipe is closed
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    with pytest.raises(FetchError, match="start it again"):
        uvloop.run(fetch(SMALL))


def test_the_environment_is_that_of_huggingface_hub(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL}, private=True)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert fetch_blocking(SMALL).model.is_relative_to(tmp_path / "home" / "hub")
    hub.seen.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_blocking(SMALL).model.read_bytes() == MODEL
    with pytest.raises(FetchError, match=r"HF_HUB_OFFLINE is set, and the cache .* has no demo/other; run") as failed:
        fetch_blocking(HubModel("demo/other"))
    assert failed.value.problem is FetchProblem.NOT_CACHED
    assert hub.seen == []


def test_without_huggingface_hub_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ModuleNotFoundError(\"No module named 'huggingface_hub'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(FetchError, match=r"pip install 'httpx2>=.*' 'huggingface-hub>=") as failed:
        fetch_blocking(SMALL)
    assert failed.value.problem is FetchProblem.NEEDS_PACKAGES


def test_a_download_ends_with_its_program(hub: StandInHub) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.stall_after = [100_000]
    program = (
        "import os, sys; from caravan_models.fetching import fetch_blocking\n"
        "from caravan_models.reference import HubModel\n"
        "say = lambda progress: print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read(), flush=True)\n"
        "fetch_blocking(HubModel('demo/small'), say)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
    wait_until(lambda: not command_line(worker), "the download ends")


def test_pull_prints_the_path_and_its_progress_elsewhere(hub: StandInHub, cache: Path) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    command = [sys.executable, "-m", "caravan_serve", "pull", "hf:demo/small"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path = Path(done.stdout.removesuffix("\n"))
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(cache)
    assert done.stderr.startswith("downloading demo/small: ")
    assert done.stderr.endswith("checking demo/small: 100 % of 400.0 kB\n")
    hub.faults.api_statuses = [403]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)
    assert failed.stderr.startswith("caravan pull: error: http://127.0.0.1:")


def test_ctrl_c_ends_a_download_without_a_traceback(hub: StandInHub) -> None:
    hub.add("demo/small", {"small-Q4_0.gguf": MODEL})
    hub.faults.stall_after = [100_000]
    for words in (["pull", "hf:demo/small"], ["serve", "hf:demo/small", "--port", "0"]):
        command = [sys.executable, "-m", "caravan_serve", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            lines = [process.stderr.readline()]
            process.send_signal(signal.SIGINT)
            lines += process.stderr.readlines()
            assert process.wait(DEADLINE_S) == 130, lines
        assert "downloading demo/small" in lines[0]
        assert "Traceback" not in "".join(lines)
        hub.faults.stall_after = [50_000]


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
            deadline = time.monotonic() + DEADLINE_S
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
    hub.faults.bytes_per_s = 3e6
    _check(hub, cache, small_gguf(3 << 20), kills=3)


@pytest.mark.slow
def test_a_model_whose_download_is_killed_at_fifty_random_bytes_is_whole(hub: StandInHub, cache: Path) -> None:
    hub.faults.bytes_per_s = 4e7
    _check(hub, cache, DEMO_FILE.read_bytes(), kills=50)

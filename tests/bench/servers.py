"""Starts and ends one server, on a free port of 127.0.0.1."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import Common, Contender
from bench.paths import CACHE, BenchError
from caravan_serve.bench.runner import cpu_seconds, with_children

_READY_S = 120.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its processes since their start."""
        return cpu_seconds(self.pids())

    def pids(self) -> tuple[int, ...]:
        """Return all its processes."""
        return with_children((self.pid,))

    def router_pids(self) -> tuple[int, ...]:
        """Return those of its processes that are not shards."""
        return tuple(pid for pid in self.pids() if not _is_shard(pid))


@contextmanager
def serving(contender: Contender, common: Common) -> Iterator[Running]:
    """Start a server and wait until it is ready. Leaving the block ends its whole process group."""
    port = _free_port()
    log = log_of(contender)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            contender.command(common, port),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=contender.checkout,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, contender, log)
            yield Running(url, process.pid)
        finally:
            _end_group(process)


def log_of(contender: Contender) -> Path:
    """Return the file that gets what the server prints."""
    return CACHE / "bench" / f"{contender.product}-{contender.name}.log".replace(" ", "-")


def _is_shard(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"caravan_shard" in command or b"caravan-shard" in command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], url: str, contender: Contender, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            message = f"{contender.name} ended with status {process.returncode} before it was ready: see {log}"
            raise BenchError(message)
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # The server does not listen yet.
        time.sleep(0.2)
    message = f"{contender.name} did not answer /health within {_READY_S:.0f} s: see {log}"
    raise BenchError(message)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, wait, and kill it. It is always killed, because a child may hang when its leader ended."""
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # All processes have ended.
        os.killpg(group, number)

"""Starts and ends the servers to compare, on a free port of 127.0.0.1."""

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
from enum import StrEnum
from pathlib import Path

from bench.paths import CACHE, ROOT, BenchError, peer

_READY_S = 120.0
_STOP_S = 10.0


class Layout(StrEnum):
    """How sequences share the KV cache."""

    SPLIT = "split"
    UNIFIED = "unified"


class Product(StrEnum):
    """The products to compare."""

    CARAVAN = "Caravan"
    LLAMA_SERVER = "llama-server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that all servers of a comparison share."""

    model: Path
    slots: int
    cells: int
    threads: int


@dataclass(frozen=True, slots=True)
class Contender:
    """A product in one layout."""

    product: Product
    layout: Layout

    def __str__(self) -> str:
        return f"{self.product} {self.layout}"

    def command(self, setting: Setting, port: int) -> list[str]:
        """Return the command that serves ``setting``."""
        common = ["-m", str(setting.model), "-np", str(setting.slots), "-c", str(setting.cells)]
        common += ["-t", str(setting.threads), "--port", str(port)]
        if self.product is Product.CARAVAN:
            program = ROOT / ".venv" / "bin" / "caravan"
            # Nothing else runs on the machine, so the threads may spin, as llama-server's do by default.
            spin = ["--spin-count", "100000"]
            return [str(program), "serve", *common, "--shards", "1", "--kv-layout", self.layout, *spin]
        layout = ["-kvu"] if self.layout is Layout.UNIFIED else ["-no-kvu"]
        return [str(peer("llama-server")), *common, *layout, "--host", "127.0.0.1", "--no-webui"]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    url: str
    pid: int


@contextmanager
def serving(contender: Contender, setting: Setting) -> Iterator[Running]:
    """Start a server and wait until it is ready. Leaving the block ends its whole process group."""
    port = _free_port()
    log = CACHE / "bench" / f"{contender.product}-{contender.layout}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            contender.command(setting, port), stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, contender, log)
            yield Running(url, process.pid)
        finally:
            _end_group(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], url: str, contender: Contender, log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            message = f"{contender} ended with status {process.returncode} before it was ready: see {log}"
            raise BenchError(message)
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # The server does not listen yet.
        time.sleep(0.2)
    message = f"{contender} did not answer /health within {_READY_S:.0f} s: see {log}"
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

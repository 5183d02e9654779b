"""`caravan serve` as a user starts it: a process with a real model on a real port."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caravan_testing.programs import children_of, children_with
from caravan_testing.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
# Of the log of a server in whose use a test fails.
_SHOWN_LINES = 200
MODEL = ROOT / os.environ.get("CARAVAN_TEST_MODEL", ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf")


# A shard that stands still on a busy host is not given up with all that it holds: tests ask what is cached. Those that
# stop a shard ask for less.
_PATIENCE = ("--shard-silence-s", "600")

# The first line of a program that opens a model with as many threads as there are CPUs for it: two threads that spin at
# barriers stand still when other processes want their cores.
ON_ONE_CPU = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    log: list[str]

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=DEADLINE_S) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, TimeoutError):
            return False

    def wait(self, condition: str) -> None:
        """Wait until the server is ``healthy`` or ``unhealthy``, as ``condition`` says."""
        wait_until(
            self.healthy,
            f"the server is {condition}",
            lambda healthy: healthy is (condition == "healthy"),
            unless=self.log_if_ended,
        )

    def log_if_ended(self) -> str:
        """Return the log if the server has ended, so that nobody waits for it any longer, else nothing."""
        return "".join(self.log) if self.process.poll() is not None else ""

    def shard_pids(self) -> list[int]:
        """Return the processes of the shards that run."""
        return children_with("caravan_shard", self.process.pid)

    def child_pids(self) -> list[int]:
        """Return the child processes: shards, and those that render templates and read files."""
        return children_of(self.process.pid)

    def descriptors(self) -> int:
        """Return the number of open file descriptors of the router, its shards and its other child processes."""
        found = 0
        for pid in (self.process.pid, *self.child_pids()):
            # One may end meanwhile.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += len(os.listdir(f"/proc/{pid}/fd"))
        return found


@contextlib.contextmanager
def serve(*flags: str, models: Sequence[str | Path] = (MODEL,)) -> Iterator[Served]:
    """Start a server and end it with SIGTERM; its exit code must be 0."""
    with start(*flags, models=models) as served:
        yield served
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(DEADLINE_S) == 0, "".join(served.log)


@contextlib.contextmanager
def start(*flags: str, models: Sequence[str | Path] = (MODEL,)) -> Iterator[Served]:
    """Start a server on a free port and wait until it is healthy; kill it at the end if it still runs."""
    named = [word for model in models for word in ("--model", str(model))]
    command = [sys.executable, "-m", "caravan_serve", "serve", *named, "--port", "0", *_PATIENCE, *flags]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, bufsize=1
        )
        assert process.stdout is not None
        log: list[str] = []
        ready = threading.Event()
        reader = threading.Thread(target=_read, args=(process.stdout, log, ready))
        reader.start()
        try:
            assert ready.wait(DEADLINE_S), "".join(log)
            found = re.search(r"Caravan is ready on (\S+)", "".join(log))
            assert found is not None, "".join(log)
            served = Served(found[1], process, log)
            served.wait("healthy")
            yield served
        except BaseException:
            # pytest shows it beside the failure.
            sys.stderr.write("".join(log[-_SHOWN_LINES:]))
            raise
        finally:
            process.kill()
            process.wait()
            reader.join()
            process.stdout.close()


def _read(stream: Iterator[str], log: list[str], ready: threading.Event) -> None:
    for line in stream:
        log.append(line)
        if line.startswith("  curl"):
            ready.set()
    ready.set()


def generate(url: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the answer of TGI's route, with its details."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def write_models(folder: Path, *names: str, **facts: object) -> Path:
    """Write a file of models, each with a file of its own."""
    lines = []
    for name in names:
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
        lines += ["[[models]]", f'name = "{name}"', f'model = "{name}.gguf"', "memory_mib = 100"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in facts.items()]
    file = folder / "models.toml"
    file.write_text("\n".join(lines))
    return file

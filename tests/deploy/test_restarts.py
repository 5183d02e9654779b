"""A router that is started again as its unit or Compose starts it continues what clients have stored.

The programs are run with the command, the variables and the umask that systemd or the container's engine would give
them. What is replaced: folders of the host, and addresses.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deploy.tools import ROOT, run_tool

from caravan_testing.waiting import DEADLINE_S

PROGRAMS = Path(sys.executable).parent
# What Service= has in the example of the unit's comment, and toy shards instead of a model.
ROUTER_ENV = {"CARAVAN_STATE_FILE": "/var/lib/caravan/state.db", "CARAVAN_PORT": "0"}
SHARD_ENV = {"CARAVAN_BACKEND": "fake"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a program is started: its command, its variables beside those of every process, and its umask."""

    command: Sequence[str]
    variables: Mapping[str, str]
    umask: int = 0o022

    def replacing(self, replaced: Mapping[str, str]) -> "Start":
        """Return it with each text of ``replaced`` in the command and the variables replaced."""

        def of(text: str) -> str:
            for old, new in replaced.items():
                text = text.replace(old, new)
            return text

        return Start(
            command=[of(word) for word in self.command],
            variables={name: of(value) for name, value in self.variables.items()},
            umask=self.umask,
        )


def of_unit(name: str, instance: str, environment_file: Mapping[str, str]) -> Start:
    """Return how systemd starts a unit."""
    text = (ROOT / "deploy/systemd" / name).read_text().replace("%i", instance)
    settings: dict[str, list[str]] = {}
    for key, value in re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE):
        settings.setdefault(key, []).append(value)
    given = (word.partition("=") for line in settings.get("Environment", []) for word in shlex.split(line))
    (command,), (umask,) = settings["ExecStart"], settings["UMask"]
    return Start(
        command=shlex.split(command),
        variables={**{key: value for key, _, value in given}, **environment_file},
        umask=int(umask, 8),
    )


def of_compose(service: str) -> Start:
    """Return how a container of a service of compose.yaml is started, from an image that is built as it says."""
    found = json.loads(run_tool("python", "tests/deploy/check_compose.py", stdin=(ROOT / "compose.yaml").read_text()))
    assert "command" not in found[service]
    assert "entrypoint" not in found[service]
    target = found[service]["build"]["target"]
    stage = (ROOT / "deploy/images/Containerfile").read_text().partition(f"\nFROM runtime AS {target}\n")[2]
    stage = stage.partition("\nFROM ")[0]
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)
    of_image = dict(
        word.split("=", 1) for line in re.findall(r"^ENV (.*)$", stage, re.MULTILINE) for word in line.split()
    )
    command, *flags = json.loads(entrypoint)
    return Start(
        command=[f"/opt/caravan/bin/{command}", *flags], variables={**of_image, **found[service]["environment"]}
    )


@dataclass
class Running:
    """A process, and the lines that it has written so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    has_news: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.has_news:
                self.lines.append(line)
                self.has_news.notify_all()

    def logged(self, pattern: str) -> str:
        """Wait until a line has ``pattern``, and return its first group."""

        def find() -> str | None:
            return next((found[1] for line in self.lines if (found := re.search(pattern, line))), None)

        with self.has_news:
            found = self.has_news.wait_for(find, DEADLINE_S)
        assert found, "".join(self.lines)
        return found


@contextlib.contextmanager
def running(start: Start) -> Iterator[Running]:
    """Run a program in the root of the file system, until the end of the block."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CARAVAN_")}
    with subprocess.Popen(
        start.command,
        env={**inherited, **start.variables},
        umask=start.umask,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        started = Running(process)
        reading = threading.Thread(target=started.read)
        reading.start()
        try:
            yield started
        finally:
            process.kill()
            process.wait()
            reading.join()


def respond(url: str, previous: str | None) -> dict[str, Any]:
    body = {"input": "Once upon a time", "max_output_tokens": 8, "previous_response_id": previous}
    request = urllib.request.Request(
        f"{url}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
    return answer


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[str]:
    """The address of a toy shard, which is started as its unit says."""
    start = of_unit("caravan-shard@.service", "a", SHARD_ENV)
    (tmp_path / "caravan-shard-a").mkdir()
    with running(start.replacing({"/opt/caravan/bin": str(PROGRAMS), "/run/": f"{tmp_path}/"})) as process:
        yield process.logged(r"listening address=(\S+)")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["restarted", "killed"])
@pytest.mark.parametrize("by", ["systemd", "Compose"])
def test_a_response_is_continued_after_a_restart(by: str, end: signal.Signals, shard: str, tmp_path: Path) -> None:
    if by == "systemd":
        start = of_unit("caravan-router.service", "", {**ROUTER_ENV, "CARAVAN_SHARD": shard})
    else:
        start = of_compose("router").replacing({"dns:shard:50051": shard, "0.0.0.0": "127.0.0.1"})
        start = Start(command=start.command, variables={**start.variables, "CARAVAN_PORT": "0"})
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    start = start.replacing({"/opt/caravan/bin": str(PROGRAMS), "/var/lib/caravan": str(state)})
    previous, ids = None, []
    # Again, since the second router has to write to the file that the first one made.
    for _ in range(3):
        with running(start) as router:
            answer = respond(router.logged(r"listening url=(\S+)"), previous)
            router.process.send_signal(end)
            assert router.process.wait(DEADLINE_S) == (0 if end is signal.SIGTERM else -end)
        assert answer["previous_response_id"] == previous
        previous = answer["id"]
        ids.append(previous)
    assert len(set(ids)) == 3
    (made,) = state.glob("*.db")
    if by == "systemd":
        assert made.stat().st_mode & 0o077 == 0

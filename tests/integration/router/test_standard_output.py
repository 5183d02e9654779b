"""Programs whose standard output nobody reads any more, as after `caravan serve --help | head -1`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from caravan_testing.waiting import DEADLINE_S, wait_until

CARAVAN = (sys.executable, "-m", "caravan_serve")
SHARD = (sys.executable, "-m", "caravan_shard")


@pytest.fixture
def unread() -> Iterator[int]:
    """The writing end of a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def _run(command: tuple[str, ...], output: int, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | variables
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ((*CARAVAN, "--help"), {}),
        ((*CARAVAN, "--help"), {"PYTHONUNBUFFERED": "1"}),
        ((*CARAVAN, "serve", "--help"), {}),
        ((*CARAVAN, "router", "--shard", "unix:x", "--print-config"), {}),
        ((*CARAVAN, "bench", "--help"), {}),
        ((*SHARD, "--help"), {}),
    ],
)
def test_a_command_that_only_prints_ends_quietly(
    command: tuple[str, ...], variables: dict[str, str], unread: int
) -> None:
    ended = _run(command, unread, **variables)
    assert ended.stderr == ""
    # argparse does not tell that it could not print all of a long text.
    assert ended.returncode in {0, 128 + signal.SIGPIPE}


def test_devices_are_listed_for_nobody_without_an_error(unread: int) -> None:
    ended = _run((*SHARD, "--list-devices"), unread)
    assert "Error" not in ended.stderr
    # A host without devices has nothing to write.
    assert ended.returncode in {0, 128 + signal.SIGPIPE}


def test_a_new_key_is_shown_although_its_entry_is_lost(unread: int) -> None:
    ended = _run((*CARAVAN, "key", "alice"), unread)
    assert re.fullmatch(r"The key, shown only now: \S+\n", ended.stderr)
    assert ended.returncode == 128 + signal.SIGPIPE


def test_a_server_serves_on(unread: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            (*CARAVAN, "serve", "--backend", "fake", "--port", "0"), stdout=unread, stderr=errors, cwd=tmp_path
        )
    try:
        # The program turns away from the pipe when it has failed to say there that it is ready.
        output = Path(f"/proc/{process.pid}/fd/1")
        wait_until(
            output.readlink,
            "it turns away from the pipe",
            lambda opened: opened == Path(os.devnull),
            unless=lambda: process.poll() is not None and log.read_text(),
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, log.read_text()
        assert "Error" not in log.read_text()
    finally:
        process.kill()
        process.wait()

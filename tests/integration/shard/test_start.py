"""The shard's command line: refused flags, and the end together with its parent."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from caravan_testing.waiting import DEADLINE_S

COMMAND = (sys.executable, "-m", "caravan_shard")


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--model", "/nowhere/model.gguf"), "cannot read the model /nowhere/model.gguf"),
        (("--model", __file__), "is no GGUF file"),
        ((), "no model given"),
        (("--backend", "fake", "--parallel", "0"), "must be >= 1 and <= 256"),
    ],
)
def test_a_start_that_cannot_work_says_why(flags: tuple[str, ...], advice: str) -> None:
    done = subprocess.run([*COMMAND, "--address", "127.0.0.1:0", *flags], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert advice in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_that_fails_by_a_bug_is_not_worth_repeating() -> None:
    script = (
        "import sys\n"
        "from caravan_shard import cli\n"
        "from caravan_shard.backends.toy import backend\n"
        "def load(**_options): raise KeyError('a bug')\n"
        "backend.ToyBackend = load\n"
        "sys.exit(cli.main(['--backend', 'fake', '--address', '127.0.0.1:0']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "caravan-shard: error: unexpected KeyError('a bug'); its traceback is above"


def test_the_configuration_can_be_printed() -> None:
    done = subprocess.run(
        [*COMMAND, "--backend", "fake", "-np", "3", "--print-config"], capture_output=True, text=True, timeout=600
    )
    assert json.loads(done.stdout)["parallel"] == 3


def test_a_shard_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        f"shard = subprocess.Popen([sys.executable, '-m', 'caravan_shard', '--backend', 'fake', '--exit-with-parent',"
        f" '--address', 'unix:{tmp_path}/shard'], stdout=sys.stdout, stderr=subprocess.PIPE, text=True)\n"
        "while 'listening' not in shard.stderr.readline(): pass\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        deadline_s = 60
        assert parent.stdin is not None
        # Both processes write to the pipe, so it closes when both have ended.
        parent.stdin.close()
        assert parent.stdout is not None
        assert parent.stdout.read() == b""
        parent.wait(deadline_s)


def test_it_ends_with_a_parent_that_ended_before_it_began() -> None:
    flags = ("--backend", "fake", "--exit-with-parent", "--address", "127.0.0.1:0")
    # Process 2 is not the parent of this one.
    env = {**os.environ, "CARAVAN_PARENT_PID": "2"}
    assert subprocess.run([*COMMAND, *flags], env=env, timeout=DEADLINE_S).returncode == -signal.SIGKILL

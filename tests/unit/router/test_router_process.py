"""The process of a router: SIGHUP, which never ends it unless its terminal is closed, and its limit of open files."""

import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from caravan_testing.waiting import DEADLINE_S, wait_until

ROUTER = [sys.executable, "-m", "caravan_serve", "router", "--shard", "127.0.0.1:1", "--port", "0", "--json-output"]
# Runs a command on a new terminal, which closes when this program ends.
ON_A_TERMINAL = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]


def url_in(log: Path) -> str:
    """Wait until the router has written where it listens."""
    # Its last line may lack its end.
    found = wait_until(log.read_text, "the router listens", lambda text: re.search(r'"message": "listening".*\n', text))
    lines = [json.loads(line) for line in found.splitlines() if '"message": "listening"' in line]
    return str(lines[0]["url"])


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/metrics") as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):  # also in the middle of a reply
        return False


@pytest.mark.parametrize("command", [ROUTER, ["nohup", *ROUTER]], ids=["plain", "nohup"])
def test_a_router_without_files_to_read_again_lives_on(command: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True) as running:
        url = url_in(log)
        for _ in range(3):
            running.send_signal(signal.SIGHUP)
            assert answers(url)
        running.terminate()
        assert running.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(("before", "lives"), [("", False), ("nohup ", True)], ids=["plain", "nohup"])
def test_a_router_ends_with_its_terminal_but_not_under_nohup(before: str, lives: bool, tmp_path: Path) -> None:
    log, number = tmp_path / "log", tmp_path / "pid"
    log.touch()
    # The terminal stays open in descriptor 9: else it hangs up when nohup lets its stdin go, before it ignores that.
    words = f"echo $$ > {number}; exec 9<&0; exec {before}{' '.join(ROUTER)} > {log} 2>&1"
    with subprocess.Popen(
        [*ON_A_TERMINAL, "sh", "-c", words], stdin=subprocess.DEVNULL, start_new_session=True
    ) as spawner:
        url = url_in(log)
        spawner.kill()
    if lives:
        time.sleep(1)
        assert answers(url)
        subprocess.run(["kill", number.read_text().strip()], check=True)
    wait_until(lambda: not answers(url), "the router ends")
    assert '"message": "draining"' in log.read_text()


def test_a_router_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = f"ulimit -Sn 256; exec {' '.join(ROUTER)}"
    with log.open("wb") as out, subprocess.Popen(["sh", "-c", words], stdout=out, stderr=out) as running:
        url_in(log)
        limits = Path(f"/proc/{running.pid}/limits").read_text().splitlines()
        running.terminate()
    (soft, hard), *_ = (line.split()[3:5] for line in limits if line.startswith("Max open files"))
    assert soft == hard

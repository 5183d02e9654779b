"""The units of systemd, checked by systemd-analyze. No systemd runs in the tests."""

import re
import subprocess
from pathlib import Path

import pytest
from deploy.tools import ROOT, run_tool, try_tool

from caravan_router.config import RouterConfig
from caravan_shard.config import ShardConfig

UNITS = ROOT / "deploy/systemd"
# The programs must exist for `systemd-analyze verify`; a checkout has them here.
INSTALLED = "/opt/caravan/bin"
# In tenths, of 100. What is left is mostly the use of networks and of Unix sockets.
MOST_EXPOSURE = 15


def analyze(*arguments: str | Path) -> str:
    run = try_tool("systemd-analyze", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    ("unit", "instance"),
    [
        ("caravan-router.service", "caravan-router.service"),
        ("caravan-shard@.service", "caravan-shard@a.service"),
    ],
)
def test_units_are_valid(unit: str, instance: str, tmp_path: Path) -> None:
    text = (UNITS / unit).read_text()
    assert f"ExecStart={INSTALLED}/caravan-" in text
    copy = tmp_path / instance
    copy.write_text(text.replace(INSTALLED, str(ROOT / ".venv/bin")))
    assert analyze("verify", "--man=no", copy) == ""


@pytest.mark.parametrize("unit", ["caravan-router.service", "caravan-shard@.service"])
def test_units_confine_the_programs(unit: str) -> None:
    analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", UNITS / unit)


def test_the_router_may_write_what_clients_store_and_open_more_files_than_connections() -> None:
    lines = (UNITS / "caravan-router.service").read_text().splitlines()
    assert {"StateDirectory=caravan", "StateDirectoryMode=0700"} < set(lines)
    (limit,) = (int(line.partition("=")[2]) for line in lines if line.startswith("LimitNOFILE="))
    assert limit > 2 * RouterConfig().max_connections


def test_units_give_programs_time_to_drain() -> None:
    limits_s = {
        "caravan-router.service": RouterConfig().graceful_termination_timeout,
        "caravan-shard@.service": ShardConfig(backend="fake").drain_timeout_s,
    }
    for unit, limit_s in limits_s.items():
        stop = re.search(r"^TimeoutStopSec=(\d+)$", (UNITS / unit).read_text(), re.MULTILINE)
        assert stop is not None
        assert int(stop[1]) > limit_s


def tracked_files() -> list[str]:
    """Return the paths of all files that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]


def is_shell_script(path: str) -> bool:
    with (ROOT / path).open("rb") as file:
        shebang = file.readline(64)
    return shebang.startswith(b"#!") and (b"bash" in shebang or b"/sh" in shebang)


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = [path for path in tracked_files() if is_shell_script(path)]
    assert ".ci/run" in scripts
    run_tool("shellcheck", *scripts)


def test_container_files_pass_hadolint() -> None:
    container_files = [path for path in tracked_files() if path.endswith("Containerfile")]
    assert container_files
    run_tool("hadolint", *container_files)


def test_the_installed_helm_runs() -> None:
    assert run_tool("helm", "version", "--short").startswith("v4.")

"""Files of Docker Compose and systemd, scripts and container files, checked by their own tools."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deploy.tools import ROOT, run_tool, try_tool

import caravan_proto
from caravan_proto.flags import load
from caravan_router.config import RouterConfig
from caravan_shard.config import ShardConfig

TEXT = (ROOT / "compose.yaml").read_text()
CHECK = "tests/deploy/check_compose.py"
IMAGE = {"router": RouterConfig, "shard": ShardConfig}
UNITS = ROOT / "deploy/systemd"
# The programs must exist for `systemd-analyze verify`; a checkout has them here.
INSTALLED = "/opt/caravan/bin"
# In tenths, of 100. What is left is mostly the use of networks and of Unix sockets.
MOST_EXPOSURE = 15


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, after the file was validated."""
    found: dict[str, Any] = json.loads(run_tool("python", CHECK, stdin=TEXT))
    return found


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("read_only: true", "readonly: true"),
        ("stop_grace_period: 45s", "stop_grace_period: 45x"),
        ("service_completed_successfully", "done"),
        ("internal: true", "internal: maybe"),
    ],
)
def test_the_validation_is_strict(right: str, wrong: str) -> None:
    assert right in TEXT
    assert try_tool("python", CHECK, stdin=TEXT.replace(right, wrong)).returncode != 0


@pytest.mark.parametrize("name", ["router", "shard"])
def test_variables_are_flags(services: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = IMAGE[name]
    variables = services[name]["environment"]
    known = {f"CARAVAN_{field.name.upper()}" for field in dataclasses.fields(config)}
    assert set(variables) <= known
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    load(config, prog=name, description="", argv=[])
    assert services[name]["image"] == f"localhost/caravan-{name}:{caravan_proto.__version__}"


def test_what_clients_store_is_on_a_volume_that_the_router_may_write_to(services: dict[str, Any]) -> None:
    router = services["router"]
    (folder,) = (mount.partition(":")[2] for mount in router["volumes"])
    assert router["environment"]["CARAVAN_STATE_FILE"].startswith(f"{folder}/")
    # Docker gives a new volume the owner that the folder has in the image.
    made = re.search(r"install -d -o 10001 -g 10001 (.*)", (ROOT / "deploy/images/Containerfile").read_text())
    assert made is not None
    assert folder in made[1].split()


def test_programs_have_time_to_drain(services: dict[str, Any]) -> None:
    limits_s = {
        "router": RouterConfig().graceful_termination_timeout,
        "shard": ShardConfig(backend="fake").drain_timeout_s,
    }
    for name, limit_s in limits_s.items():
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > limit_s


def test_mounted_files_exist_and_ports_are_open_on_this_host_only(services: dict[str, Any]) -> None:
    mounted = [path for service in services.values() for path in service.get("volumes", []) if path.startswith("./")]
    assert len(mounted) == 6
    for path in mounted:
        assert (ROOT / path.partition(":")[0]).exists(), path
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_prometheus_accepts_its_configuration(services: dict[str, Any], tmp_path: Path) -> None:
    for path in services["prometheus"]["volumes"]:
        source, _, target = path.removesuffix(":ro").partition(":")
        if source.startswith("./"):
            shutil.copy(ROOT / source, tmp_path / Path(target).name)
    run_tool("promtool", "check", "config", tmp_path / "prometheus.yml")


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

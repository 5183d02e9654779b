"""Paths in the repository, the version of llama.cpp to compare with, and what machine this is."""

import os
import platform
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
DEMO_MODEL = CACHE / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llama-cpp-python"


class BenchError(Exception):
    """The comparison cannot continue; the message says what to do."""


def pinned_version() -> str:
    """Return the version of llama-cpp-python that pyproject.toml pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        name, equals, version = str(requirement).partition("==")
        if name == _PACKAGE and equals:
            return version
    message = f"pyproject.toml pins no {_PACKAGE}==VERSION in its dependencies; the peers must be of the same version"
    raise BenchError(message)


def peers_dir(version: str) -> Path:
    """Return the folder where llama.cpp's programs of ``version`` are built."""
    return CACHE / "peers" / version


def peer(name: str) -> Path:
    """Return the path of a built program. Raises BenchError if it is missing."""
    program = peers_dir(pinned_version()) / "bin" / name
    if not program.is_file():
        message = f"{name} is not built: run `make bench`, which builds it"
        raise BenchError(message)
    return program


def describe() -> str:
    """Return the number of cores and the CPU model, for captions."""
    return f"{os.cpu_count()} cores, {_cpu_model()}"


def busy_seconds() -> float:
    """Return the CPU time of all processes since boot, time stolen by the hypervisor included."""
    user, nice, system, _idle, _iowait, *rest = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    # The last two fields are guest time, which is already part of user time.
    ticks = sum(map(int, (user, nice, system, *rest[:3])))
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

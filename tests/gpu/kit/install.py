"""Makes the environment of the wheels that were carried, and unpacks the source of llama.cpp."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from bench.paths import describe
from gpu.kit import cuda
from gpu.kit.job import (
    OWN,
    PACKED,
    PYTHON,
    ROOT,
    SOURCE,
    UNPACKED,
    UNPACKED_WHEELS,
    VENV,
    WHEELS,
    Job,
    KitError,
    keep,
    run_stage,
)


def run(job: Job) -> None:
    """Make them, unless they are there."""
    if not PACKED.is_file():
        message = f"{PACKED} is missing: run `kit.sh pack` where there is a network, and bring .cache/gpu-kit/carried"
        raise KitError(message)
    packed = json.loads(PACKED.read_text())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if packed["python"] != version:
        message = (
            f"the wheels are for Python {packed['python']}, this is {version}: run `kit.sh pack --python {version}`"
        )
        raise KitError(message)
    if VENV.exists() and not OWN.exists():
        message = f"{VENV} is not the kit's: run it in a copy of the repository, such as `git worktree add`"
        raise KitError(message)
    facts = [describe(), platform.platform(), *_tools(job)]
    print("\n".join(facts))
    keep("host", "host", {"facts": facts})
    _unpack(WHEELS, UNPACKED_WHEELS)
    _make_environment(UNPACKED_WHEELS)
    _unpack(SOURCE, UNPACKED)


def _tools(job: Job) -> Iterator[str]:
    """Return what the driver says of the card, and the versions of the compilers. Raises KitError if one is missing."""
    environment = dict(os.environ)
    commands = [["cmake", "--version"], ["g++", "--version"]]
    if not job.rehearsal:
        environment = cuda.with_compiler(environment)
        yield cuda.describe_card()
        commands.append(["nvcc", "--version"])
    for command in commands:
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            message = f"{command[0]} is missing, and a build needs it"
            raise KitError(message)
        told = subprocess.run([program, command[1]], capture_output=True, text=True, check=False).stdout.strip()
        lines = told.splitlines()
        yield (f"{program}: {lines[-1] if command[0] == 'nvcc' else lines[0]}")


def _make_environment(wheels: Path) -> None:
    shutil.rmtree(VENV, ignore_errors=True)
    # pip comes as a wheel, and runs out of it: not every Python has the parts that install one.
    _checked([sys.executable, "-m", "venv", "--without-pip", str(VENV)])
    OWN.touch()
    pip = next(wheels.glob("pip-*.whl"))
    environment = {**os.environ, "PYTHONPATH": str(pip)}
    install = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    _checked([*install, *map(str, sorted(wheels.glob("*.whl")))], environment)
    # With what it needs to be built in the environment itself.
    _checked([*install, "--no-build-isolation", "--editable", str(ROOT)], environment)


def _unpack(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tarfile.open(source) as archive:
        archive.extractall(target, filter="data")


def _checked(command: list[str], environment: dict[str, str] | None = None) -> None:
    if subprocess.run(command, env=environment, check=False).returncode != 0:
        message = f"failed: {' '.join(command[:6])} ...; the reason is above"
        raise KitError(message)


if __name__ == "__main__":
    sys.exit(run_stage(run))

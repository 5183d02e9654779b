"""What each stage is told, where the kit keeps what, and how a stage tells how it ended.

Needs the standard library alone, as all that runs before the environment is there.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# In an environment that the kit has made.
OWN = VENV / ".gpu-kit"
FOLDER = ROOT / ".cache" / "gpu-kit"

# What `pack` makes, and what travels with the repository.
CARRIED = FOLDER / "carried"
SOURCE = CARRIED / "llama.cpp.tar.xz"
WHEELS = CARRIED / "wheels.tar.xz"
VOCABULARY = CARRIED / "vocabulary.gguf"
PACKED = CARRIED / "packed.json"

# What is made on the host.
WORK = FOLDER / "work"
UNPACKED = WORK / "source"
UNPACKED_WHEELS = WORK / "wheels"
BUILD = WORK / "build"
MODELS = WORK / "models"
RESULTS = FOLDER / "results"

# Of what travels.
LIMIT = 64 << 20


class KitError(Exception):
    """The stage cannot continue; the message says why."""


class UnfinishedError(Exception):
    """The time is over, and the same stage goes on from here when it is started again."""


def out_folder() -> Path:
    """Return the folder where results are left if no flag says another: that of the variable OUT, if it is set."""
    return Path(os.environ.get("OUT", RESULTS))


def travelling() -> dict[str, int]:
    """Return the bytes of each part."""
    parts = {"the repository": _repository_bytes()}
    for path in sorted(CARRIED.iterdir()) if CARRIED.is_dir() else ():
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        parts[path.name] = sum(file.stat().st_size for file in files)
    return parts


def size_table(parts: Mapping[str, int], limit: int = LIMIT) -> str:
    """Return a line for each part and their sum. Raises KitError if that is more than ``limit``."""
    total = sum(parts.values())
    lines = [f"{size / 2**20:8.1f} MiB  {name}" for name, size in {**parts, "together": total}.items()]
    if total > limit:
        message = f"too much travels, {(total - limit) / 2**20:.1f} MiB above {limit / 2**20:.0f}:\n" + "\n".join(lines)
        raise KitError(message)
    return "\n".join([*lines, f"{(limit - total) / 2**20:8.1f} MiB  left of {limit / 2**20:.0f}"])


def _repository_bytes() -> int:
    """Return the bytes of the files that git has, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {ROOT / name for name in listed.stdout.split("\0") if name}
    return sum(file.lstat().st_size for file in files if file.is_file())


# The status of a stage that goes on when it is started again; EX_TEMPFAIL of sysexits.h.
UNFINISHED = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """``rehearsal``: on the CPU, with small models. ``until``: the time since the epoch at which the stage must end."""

    rehearsal: bool
    until: float

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.until - time.time()

    def need(self, seconds: float) -> None:
        """Raise UnfinishedError if fewer than ``seconds`` are left."""
        if self.left_s() < seconds:
            message = f"{max(0.0, self.left_s()):.0f} s are left, and what comes next takes about {seconds:.0f} s"
            raise UnfinishedError(message)

    def flags(self) -> list[str]:
        """Return the flags from which `run_stage` makes this job again."""
        return ["--until", f"{self.until}", *(["--rehearsal"] if self.rehearsal else [])]


def run_stage(run: Callable[[Job], None]) -> int:
    """Run the stage of a module with the job of its flags; return the status to exit with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--until", type=float, default=time.time() + 3600)
    given = parser.parse_args()
    try:
        run(Job(rehearsal=given.rehearsal, until=given.until))
    except UnfinishedError as error:
        print(f"not finished: {error}", flush=True)
        return UNFINISHED
    except KitError as error:
        print(f"failed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def keep(kind: str, name: str, result: dict[str, Any]) -> None:
    """Keep a result for the report, and so that a stage that goes on does not make it again."""
    folder = RESULTS / kind
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.with_suffix(".unfinished").write_text(json.dumps(result, indent=1))
    path.with_suffix(".unfinished").rename(path)


def kept(kind: str) -> dict[str, dict[str, Any]]:
    """Return all results of a kind, by their names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / kind).glob("*.json"))}

"""Where things are, from the repository's root."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
DEMO_MODEL = CACHE / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE = "llama-cpp-python"


class BenchError(Exception):
    """The comparison cannot go on; the message says what to do."""


def pinned_version() -> str:
    """The version of llama-cpp-python that pyproject.toml pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["optional-dependencies"]["shard"]:
        name, equals, version = str(requirement).partition("==")
        if name == _PACKAGE and equals:
            return version
    message = f"pyproject.toml pins no {_PACKAGE}==VERSION in the extra 'shard'; the peers must be of the same version"
    raise BenchError(message)


def peers_dir(version: str) -> Path:
    """Where the peers of ``version`` are built."""
    return CACHE / "peers" / version


def peer(name: str) -> Path:
    """A built program of the pinned version."""
    program = peers_dir(pinned_version()) / "bin" / name
    if not program.is_file():
        message = f"{name} is not built: run `make bench-peers` first"
        raise BenchError(message)
    return program

"""The packages of others that each part of Caravan needs, and how a program says which of them are missing.

The distribution requires all of them, so that `pip install` makes a complete Caravan. pip cannot leave any out, so an
environment for one part, such as a client without llama.cpp, is made in two steps: `pip install --no-deps`, and
`pip install $(python -m caravan_proto.packages client)`.

Imports the standard library alone.
"""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Sequence
from enum import StrEnum

_DISTRIBUTION = "llama-caravan"


class Part(StrEnum):
    """What can be installed alone, or needs more than the rest of its program."""

    CLIENT = "client"
    DIALECTS = "dialects"
    ENGINE = "engine"
    ROUTER = "router"
    MODELS = "models"
    SHARD = "shard"
    SERVE = "serve"
    LIBRARY = "library"
    BENCH = "bench"
    RUN = "run"
    OTLP = "otlp"
    MCP = "mcp"
    POSTGRESQL = "postgresql"


_DIALECTS = ("jinja2", "miniaudio", "msgspec", "pillow")
_GRPC = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "uvloop")
_ENGINE = (*_DIALECTS, *_GRPC, "prometheus-client")
_MODELS = ("httpx2", "huggingface-hub", "tqdm")
_SHARD = (*_MODELS, *_GRPC, "llama-cpp-python", "llguidance", "numpy")
# The names of distributions. Their versions are in pyproject.toml.
NEEDS = {
    Part.CLIENT: ("httpx2", "msgspec"),
    Part.DIALECTS: _DIALECTS,
    Part.ENGINE: _ENGINE,
    Part.ROUTER: (*_ENGINE, "aiohttp"),
    Part.MODELS: _MODELS,
    Part.SHARD: _SHARD,
    Part.SERVE: (*_ENGINE, "aiohttp", *_SHARD),
    Part.LIBRARY: (*_ENGINE, *_SHARD),
    Part.BENCH: ("aiohttp", "msgspec", "rich"),
    Part.RUN: ("httpx2", "msgspec", "prompt-toolkit", "rich"),
    Part.OTLP: (
        "opentelemetry-sdk",
        "opentelemetry-exporter-otlp-proto-grpc",
        "opentelemetry-exporter-otlp-proto-http",
    ),
    Part.MCP: ("mcp",),
    Part.POSTGRESQL: ("psycopg",),
}
# The modules of distributions whose names differ.
_MODULES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "llama-cpp-python": "llama_cpp",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "pillow": "PIL",
    "protobuf": "google.protobuf",
}


def requirements(*parts: Part) -> list[str]:
    """Return what pip installs for these parts, with versions: "aiohttp>=3.14.5"."""
    return _with_versions([name for part in parts for name in NEEDS[part]])


def missing(part: Part) -> list[str]:
    """Return the names of distributions that ``part`` needs and that are not installed."""
    return [name for name in dict.fromkeys(NEEDS[part]) if not _is_installed(module_of(name))]


def lack(part: Part) -> str:
    """Return what is missing and how to install it, as the end of a sentence; "" if nothing is missing."""
    names = missing(part)
    return f"needs packages that are not installed: {_install(names)}" if names else ""


def install_command(part: Part) -> str:
    """Return the command that installs what ``part`` lacks, or all that it needs if nothing seems to be missing."""
    return _install(missing(part) or NEEDS[part])


def import_error(what: str, part: Part, failed: ModuleNotFoundError) -> ImportError:
    """Return the error that ``what`` raises because an import has ``failed``: with the command that helps, if any."""
    lacking = lack(part)
    return ImportError(f"{what} {lacking}", name=failed.name) if lacking else failed


def module_of(name: str) -> str:
    """Return the module of a distribution."""
    return _MODULES.get(name, name.replace("-", "_"))


def _install(names: Sequence[str]) -> str:
    return " ".join(["pip install", *(f"'{requirement}'" for requirement in _with_versions(names))])


def _with_versions(names: Sequence[str]) -> list[str]:
    try:
        declared = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    versions = {_name(line): line.partition(";")[0].strip() for line in declared}
    return [versions.get(name, name) for name in dict.fromkeys(names)]


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package that it is in.
        return False


def main() -> int:
    """Print the requirements of the parts that the arguments name, one in each line."""
    try:
        parts = [Part(word) for word in sys.argv[1:]]
    except ValueError:
        parts = []
    if not parts:
        sys.stderr.write(f"usage: python -m caravan_proto.packages {{{','.join(Part)}}} ...\n")
        return 2
    sys.stdout.writelines(f"{requirement}\n" for requirement in requirements(*parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())

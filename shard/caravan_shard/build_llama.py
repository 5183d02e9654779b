"""The command `caravan build-llama`: builds llama.cpp with Caravan's kernels and installs it into this environment.

It replaces the llama-cpp-python that is installed, in the same version. CMAKE_ARGS has further flags of CMake, such as
-DGGML_CUDA=on. The wheel is kept in pip's cache folder.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from caravan_proto.command_line import Parser
from caravan_shard.llama_wheel import BuildError, built_wheel, pinned_requirement, say

_CHECK = "from caravan_shard.build_llama import print_kernels; print_kernels()"
_OWN = "own"


def build_parser() -> Parser:
    """Return the parser of `caravan build-llama`."""
    return Parser(prog="caravan build-llama", description=__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Build and install; return the status of the process."""
    build_parser().parse_args(argv)
    try:
        _install(_wheel())
    except BuildError as error:
        sys.stderr.write(f"caravan build-llama: error: {error}\n")
        return 1
    say("llama.cpp has Caravan's kernels now. Shards that run already use them once they are started again")
    return 0


def _wheel() -> Path:
    if importlib.util.find_spec("pip") is None:
        raise BuildError(f"this environment has no pip: {sys.executable} -m ensurepip installs it")
    requirement = pinned_requirement("\n".join(importlib.metadata.requires("llama-caravan") or []))
    return built_wheel(sys.executable, requirement, Path.home() / ".cache")


def _install(wheel: Path) -> None:
    """Install ``wheel`` in place of another build of its version; raises BuildError."""
    say(f"Installing {wheel.name}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    # First what it needs, for which pip looks only where the version is not there already.
    for flags in ([], ["--force-reinstall", "--no-deps"]):
        if subprocess.run([*pip, *flags, str(wheel)], check=False).returncode != 0:  # noqa: S603 - pip
            raise BuildError(f"pip could not install {wheel}; its output is above")
    # In a new process, which finds what is installed now and may crash alone.
    found = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True, check=False)  # noqa: S603
    if found.stdout.strip() != _OWN:
        raise BuildError(f"{wheel} was installed, but llama.cpp has no kernels of Caravan:\n{found.stderr}")


def print_kernels() -> None:
    """Load llama.cpp, and print which kernels there are. Raises StartupError if a shard cannot call them."""
    # It needs nothing that does not come with llama-cpp-python, which may be installed before the rest.
    from caravan_shard.backends.llama.kernels.kernels_abi import loaded_kernels

    sys.stdout.write(loaded_kernels().value)


if __name__ == "__main__":
    sys.exit(main())

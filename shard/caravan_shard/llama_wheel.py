"""Builds the wheel of llama-cpp-python with Caravan's kernels in it: for `make` and for `caravan build-llama`.

llama-cpp-python is on PyPI as source only, and is built for this machine. The wheel is kept in pip's cache folder by
version, compiler flags, processor and kernels, so that a second environment builds nothing. Set CMAKE_ARGS for another
build, for example CMAKE_ARGS=-DGGML_CUDA=on.

Needs the standard library alone, of any Python: `make` imports it before anything is installed.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PACKAGE = "llama-cpp-python"
_SHOWN_LINES = 40


class BuildError(Exception):
    """There is no wheel; the message says why."""


def kernel_sources() -> Path:
    """Return the folder of the kernels' CMake files and sources: within the installed package, else beside it."""
    package = Path(__file__).resolve().parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def pinned_requirement(text: str) -> str:
    """Return the requirement in ``text`` that names one version of llama-cpp-python. Raises BuildError without one."""
    match = re.search(rf"{_PACKAGE}==[0-9.]+", text)
    if match is None:
        raise BuildError(f"no version of {_PACKAGE} is required")
    return match[0]


def check_compiler() -> None:
    """Raise BuildError if the tool is missing that cannot come from PyPI."""
    if not any(shutil.which(compiler) for compiler in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))):
        raise BuildError("a C++ compiler is needed to build llama.cpp. On Debian: apt-get install g++")


def built_wheel(python: str | Path, requirement: str, fallback: Path) -> Path:
    """Return the wheel of ``requirement`` for this machine; build it unless the cache has it. Raises BuildError.

    ``python``: whose pip builds it, of this version. ``fallback``: the cache folder if pip has none.
    """
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    asked = subprocess.run([*pip, "cache", "dir"], capture_output=True, text=True, check=False)  # noqa: S603 - pip
    folder = Path(asked.stdout.strip() or fallback) / "caravan" / _key(requirement)
    with _alone(folder.with_suffix(".lock")):
        if list(folder.glob("*.whl")):
            say(f"Taking {requirement}, which was built before, from {folder}")
        else:
            _build(pip, requirement, folder)
    return next(folder.glob("*.whl"))


def say(text: str) -> None:
    """Print what happens now."""
    sys.stdout.write(f"==> {text}\n")
    sys.stdout.flush()


def _cmake_flags() -> str:
    # RPC lets a shard keep layers on other hosts. It is two source files, 2 % of the build's time.
    return f"-DGGML_RPC=ON {os.environ.get('CMAKE_ARGS', '')}".strip()


def _key(requirement: str) -> str:
    """Return what names this build: where it is equal, so is the wheel."""
    sources = kernel_sources()
    compiled = [
        *sorted(sources.glob("*.cmake")),
        *sorted(sources.glob("include/*.h")),
        *sorted(sources.glob("src/*.c")),
    ]
    contents = [path.read_text() for path in compiled]
    parts = [requirement, sys.version[:4], _processor(), _cmake_flags(), *contents]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's features. A wheel that was built for other ones may crash with an illegal instruction."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until nobody else builds the same wheel, which takes all cores for minutes."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(pip: Sequence[str], requirement: str, folder: Path) -> None:
    """Build the wheel into ``folder`` and show the progress."""
    check_compiler()
    say(f"Building {requirement} for this machine: some minutes, once; kept in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    changes = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={kernel_sources() / 'llama.cmake'}"
    environment = {**os.environ, "CMAKE_ARGS": f"{changes} {_cmake_flags()}"}
    # pip's own wheel cache does not depend on CMAKE_ARGS, so it must not be used. Nor may a wheel from an index.
    flags = ["-v", "--no-cache-dir", "--no-deps", "--no-binary", _PACKAGE, "--wheel-dir", str(folder)]
    log_path = folder.with_suffix(".log")
    started = time.monotonic()
    build = subprocess.Popen(  # noqa: S603 - pip
        [*pip, "wheel", *flags, requirement],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with log_path.open("w") as log, build:
        assert build.stdout is not None
        for line in _showing_progress(build.stdout, started):
            log.write(line)
    if build.returncode != 0:
        sys.stderr.writelines(log_path.read_text().splitlines(keepends=True)[-_SHOWN_LINES:])
        shutil.rmtree(folder)
        raise BuildError(f"building {_PACKAGE} failed; the end of its output is above, all of it in {log_path}")
    log_path.unlink()
    say(f"Built in {time.monotonic() - started:.0f} s")


def _showing_progress(lines: Iterator[str], started: float) -> Iterator[str]:
    shown = 0.0
    is_terminal = sys.stdout.isatty()
    for line in lines:
        yield line
        step = re.search(r"\[(\d+)/(\d+)\]", line)
        now = time.monotonic()
        if step and now - shown > (1 if is_terminal else 15):
            shown = now
            end = "\r" if is_terminal else "\n"
            sys.stdout.write(f"    compiled {step[1]} of {step[2]} files, {now - started:.0f} s{end}")
            sys.stdout.flush()

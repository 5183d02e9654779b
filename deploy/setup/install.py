"""Sets up the virtual environment for `make`. Needs only the system's Python and its standard library.

llama-cpp-python is on PyPI as source only, and is built for this machine. The wheel is kept in pip's cache folder by
version, compiler flags and processor, so that a second checkout builds nothing. Set CMAKE_ARGS for another build, for
example CMAKE_ARGS=-DGGML_CUDA=on.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from quiet_pip import run_pip

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
SETUP = ROOT / "deploy" / "setup"
PYTHON = VENV / "bin" / "python"
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check"]
STAMP = VENV / ".installed"
NEEDED_PIP = "pip>=25.1"  # dependency groups
# RPC lets a shard keep layers on other hosts. It is two source files, 2 % of the build's time.
CMAKE_FLAGS = f"-DGGML_RPC=ON {os.environ.get('CMAKE_ARGS', '')}".strip()


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


def install(arguments: list[str], what: str) -> None:
    if not run_pip(["install", "--quiet", *arguments], PYTHON, ROOT):
        fail(f"{what} failed; its output is above")


def check_tools() -> None:
    """Exit with a message if a tool is missing that cannot come from PyPI."""
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may run this script
        fail(f"Python 3.11 or newer is needed, this is {platform.python_version()}. Try: make PYTHON=python3.11 …")
    if not any(shutil.which(compiler) for compiler in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))):
        fail("a C++ compiler is needed to build llama.cpp. On Debian: apt-get install g++")


def create_environment() -> None:
    if PYTHON.exists():
        return
    say("Creating .venv")
    if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        fail("could not create a virtual environment. On Debian: apt-get install python3-venv")
    install(["--upgrade", NEEDED_PIP], "upgrading pip")


def llama_requirement() -> str:
    """Return the requirement that pyproject.toml pins."""
    match = re.search(r'"(llama-cpp-python==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    if match is None:
        fail("pyproject.toml pins no llama-cpp-python")
    return match[1]


def processor() -> str:
    """Return the processor's features. A wheel that was built for other ones may crash with an illegal instruction."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


def build_wheel(requirement: str, folder: Path) -> None:
    """Build the wheel into ``folder`` and show the progress."""
    say(f"Building {requirement} for this machine: some minutes, once; kept in {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    changes = f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={SETUP / 'llama.cmake'}"
    environment = {**os.environ, "CMAKE_ARGS": f"{changes} {CMAKE_FLAGS}"}
    # pip's own wheel cache does not depend on CMAKE_ARGS, so it must not be used.
    command = [*PIP, "wheel", "-v", "--no-cache-dir", "--no-deps", "--wheel-dir", str(folder), requirement]
    log_path = folder / "build.log"
    started, shown = time.monotonic(), 0.0
    with log_path.open("w") as log:
        build = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert build.stdout is not None
        for line in build.stdout:
            log.write(line)
            step = re.search(r"\[(\d+)/(\d+)\]", line)
            now = time.monotonic()
            if step and now - shown > (1 if sys.stdout.isatty() else 15):
                shown = now
                end = "\r" if sys.stdout.isatty() else "\n"
                print(f"    compiled {step[1]} of {step[2]} files, {now - started:.0f} s", end=end, flush=True)
    if build.wait() != 0:
        print("".join(log_path.read_text().splitlines(keepends=True)[-40:]), file=sys.stderr)
        shutil.copy(log_path, ROOT / ".cache" / "llama-build.log")
        shutil.rmtree(folder)
        fail("building llama-cpp-python failed; the end of its output is above, all of it in .cache/llama-build.log")
    say(f"Built in {time.monotonic() - started:.0f} s")


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other checkout builds the same wheel, which takes all cores for minutes."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wheel() -> Path:
    """Return the llama-cpp-python wheel for this machine; build it unless the cache has it."""
    requirement = llama_requirement()
    changes = [path.read_text() for path in (SETUP / "llama.cmake", *sorted(SETUP.glob("*.[ch]")))]
    key = "\n".join([requirement, sys.version[:4], processor(), CMAKE_FLAGS, *changes])
    cache = subprocess.run([*PIP, "cache", "dir"], capture_output=True, text=True, check=False).stdout.strip()
    folder = Path(cache or ROOT / ".cache") / "caravan" / hashlib.sha256(key.encode()).hexdigest()[:16]
    with alone(folder.with_suffix(".lock")):
        if list(folder.glob("*.whl")):
            say(f"Taking {requirement}, which was built before, from {folder}")
        else:
            build_wheel(requirement, folder)
    return next(folder.glob("*.whl"))


def is_installed(built: Path) -> bool:
    """Whether the environment has this very wheel. For pip, wheels of one version are the same."""
    records = VENV.glob("lib/python*/site-packages/llama_cpp_python-*.dist-info/direct_url.json")
    return any(json.loads(record.read_text())["url"] == built.as_uri() for record in records)


def main() -> None:
    check_tools()
    (ROOT / ".cache").mkdir(exist_ok=True)
    create_environment()
    built = wheel()
    say("Installing packages: router, shard, and what the tests need")
    if not is_installed(built):
        install(["--force-reinstall", "--no-deps", str(built)], "installing llama-cpp-python")
    packages = [str(built), "--editable", ".[router,shard,client,bench,otlp]", "--group", "dev"]
    install(["--progress-bar", "on", "--constraint", "constraints.txt", *packages], "installing packages")
    STAMP.touch()


if __name__ == "__main__":
    main()

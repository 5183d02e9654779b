"""Sets up the virtual environment for `make`. Needs only the system's Python and its standard library.

`caravan_shard.llama_wheel` builds llama.cpp, as it does for `caravan build-llama`.
"""

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from quiet_pip import run_pip

if sys.version_info < (3, 11):  # noqa: UP036 - any Python may run this script
    sys.exit(
        f"error: Python 3.11 or newer is needed, this is {platform.python_version()}. Try: make PYTHON=python3.11 …"
    )
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "shard"))

from caravan_shard.llama_wheel import (  # noqa: E402 - it is found, and understood, only now
    BuildError,
    built_wheel,
    check_compiler,
    pinned_requirement,
    say,
)

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".installed"
# Without it, the environment may be half of one, whose setup was interrupted.
CREATED = VENV / ".created"
NEEDED_PIP = "pip>=25.1"  # dependency groups


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


def install(arguments: list[str], what: str) -> None:
    if not run_pip(["install", "--quiet", *arguments], PYTHON, ROOT):
        fail(f"{what} failed; its output is above")


def create_environment() -> None:
    if CREATED.exists():
        return
    say("Creating .venv")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=False).returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        fail("could not create a virtual environment. On Debian: apt-get install python3-venv")
    install(["--upgrade", NEEDED_PIP], "upgrading pip")
    CREATED.touch()


def is_installed(built: Path) -> bool:
    """Whether the environment has this very wheel. For pip, wheels of one version are the same."""
    records = VENV.glob("lib/python*/site-packages/llama_cpp_python-*.dist-info/direct_url.json")
    return any(json.loads(record.read_text())["url"] == built.as_uri() for record in records)


def main() -> None:
    (ROOT / ".cache").mkdir(exist_ok=True)
    try:
        check_compiler()
        create_environment()
        built = built_wheel(PYTHON, pinned_requirement((ROOT / "pyproject.toml").read_text()), ROOT / ".cache")
    except BuildError as error:
        fail(str(error))
    say("Installing packages: router, shard, and what the tests need")
    if not is_installed(built):
        install(["--force-reinstall", "--no-deps", str(built)], "installing llama-cpp-python")
    packages = [str(built), "--editable", ".[mcp,otlp,postgresql]", "--group", "dev"]
    install(["--progress-bar", "on", "--constraint", "constraints.txt", *packages], "installing packages")
    STAMP.touch()


if __name__ == "__main__":
    main()

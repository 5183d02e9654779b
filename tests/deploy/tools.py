"""The tools that `make test-deploy` installs and those of Debian, and how tests run them."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ROOT / ".cache/tools/deploy/bin"
# Tools that PyPI does not have, with the packages of Debian that do.
_OF_DEBIAN = {
    "nginx": "nginx-light",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "systemd-analyze": "systemd",
}


def tool_path(name: str) -> Path:
    """Return the path of a tool; fails the test if it is not installed."""
    if (package := _OF_DEBIAN.get(name)) is not None:
        found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
        assert found is not None, f"{name} is missing: apt-get install {package}"
        return Path(found)
    assert (_TOOLS / name).exists(), f"{name} is not installed: run `make test-deploy`"
    return _TOOLS / name


def run_tool(name: str, *arguments: str | Path, stdin: str = "") -> str:
    """Run a tool in the repository's root and return what it prints; fails the test with its output if it fails."""
    run = try_tool(name, *arguments, stdin=stdin)
    assert run.returncode == 0, f"{name} {' '.join(map(str, arguments))}\n{run.stdout}{run.stderr}"
    return run.stdout


def try_tool(name: str, *arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool in the repository's root, and return its outputs and exit code."""
    return subprocess.run(
        [tool_path(name), *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=600, check=False
    )

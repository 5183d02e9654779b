"""The tools that `make test-deploy` installs, and how tests run them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ROOT / ".cache/tools/deploy/bin"


def run_tool(name: str, *arguments: str | Path, stdin: str = "") -> str:
    """Run a tool in the repository's root and return what it prints; fails the test with its output if it fails."""
    run = try_tool(name, *arguments, stdin=stdin)
    assert run.returncode == 0, f"{name} {' '.join(map(str, arguments))}\n{run.stdout}{run.stderr}"
    return run.stdout


def try_tool(name: str, *arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool in the repository's root, and return its outputs and exit code."""
    program = _TOOLS / name
    assert program.exists(), f"{name} is not installed: run `make test-deploy`"
    return subprocess.run(
        [program, *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )

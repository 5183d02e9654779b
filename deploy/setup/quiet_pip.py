"""Runs pip without the warning that it prints for each package and each location of an index that lacks the package."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_NEEDLESS = "is ignored: it is neither a file nor a directory."


def run_pip(arguments: Sequence[str], python: str | Path = sys.executable, folder: Path | None = None) -> bool:
    """Run the pip of ``python`` in ``folder`` with ``arguments``; return whether it did not fail.

    Its other warnings and its errors go to stderr, as they come.
    """
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, errors="replace") as pip:
        assert pip.stderr is not None
        for line in pip.stderr:
            if _NEEDLESS not in line:
                sys.stderr.write(line)
                sys.stderr.flush()
    return pip.returncode == 0

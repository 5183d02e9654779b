"""Sets up an environment of its own for programs that the tests run: environment.py FOLDER REQUIREMENTS [PYTHON].

The environment has the Python that runs this unless another one is named. The one that runs this installs into it, so
that the environment needs no pip. Modules are compiled when they are first imported: most of those of a client library
are never, and all of them would take longer than unpacking them.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from quiet_pip import run_pip


def main() -> None:
    """Make the environment anew; exit with a message if that fails."""
    folder, requirements, *named = sys.argv[1:]
    python = named[0] if named else sys.executable
    if shutil.which(python) is None or not _runs(python):
        sys.exit(f"error: {requirements} needs {python}, which does not run here")
    print(f"==> Installing {requirements} into {folder}", flush=True)
    made = subprocess.run([python, "-m", "venv", "--clear", "--without-pip", folder], check=False)
    into = ["--python", str(Path(folder, "bin", "python"))]
    flags = ["--quiet", "--no-deps", "--no-compile"]
    if made.returncode != 0 or not run_pip([*into, "install", *flags, "--requirement", requirements]):
        sys.exit(f"error: could not install {requirements}; the reason is above")


def _runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()

"""Sets up an environment of its own for programs that the tests run: environment.py FOLDER REQUIREMENTS.

The Python that runs this installs into it, so that the environment needs no pip. Modules are compiled when they are
first imported: most of those of a client library are never, and all of them would take longer than unpacking them.
"""

import subprocess
import sys
from pathlib import Path

from quiet_pip import run_pip


def main() -> None:
    """Make the environment anew; exit with a message if that fails."""
    folder, requirements = sys.argv[1:]
    print(f"==> Installing {requirements} into {folder}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=False)
    into = ["--python", str(Path(folder, "bin", "python"))]
    flags = ["--quiet", "--no-deps", "--no-compile"]
    if made.returncode != 0 or not run_pip([*into, "install", *flags, "--requirement", requirements]):
        sys.exit(f"error: could not install {requirements}; the reason is above")


if __name__ == "__main__":
    main()

"""Installs the packages of a lock file from npm: node_packages.py FOLDER SOURCE.

SOURCE has package.json and package-lock.json. Packages run no scripts of their own; the script `setup` of package.json
then runs those that are needed.
"""

import shutil
import subprocess
import sys
from pathlib import Path

_OLDEST = 20


def main() -> None:
    """Bring the folder up to date; exit with a message if that fails."""
    folder, source = map(Path, sys.argv[1:])
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or _version(node) < _OLDEST:
        sys.exit(f"error: {source} needs Node {_OLDEST} or later with npm, see nodejs.org")
    print(f"==> Installing {source} into {folder}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(source / name, folder)
    # The lock file may lack what only other platforms need, which `npm ci` refuses. npm warns of packages that name a
    # newer Node than they need.
    install = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    for command in (install, [npm, "run", "--if-present", "--silent", "setup"]):
        if subprocess.run(command, cwd=folder, check=False).returncode != 0:
            sys.exit(f"error: could not install {source}; the reason is above")


def _version(node: str) -> int:
    found = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    return int(found.removeprefix("v").partition(".")[0] or 0)


if __name__ == "__main__":
    main()

"""Takes the pictures of docs/page.md from a real run: `make screenshots`."""

import subprocess
import sys

from caravan_testing.serve_process import ROOT, serve

FOLDER = ROOT / "docs" / "page"
PYTHON = ROOT / ".cache/clients/page/bin/python"
SESSION = ROOT / "tests/e2e/clients/page_screenshots.py"
# Few cells and places, so that something waits.
FLAGS = ("--shards", "2", "-np", "4", "-c", "4096", "-t", "1", "--speculate", "4", "--cache-ram", "64")


def main() -> None:
    with serve(*FLAGS) as server:
        sys.exit(subprocess.run([PYTHON, SESSION, server.url, FOLDER], check=False).returncode)


if __name__ == "__main__":
    main()

"""What the set-up shows of pip's output, with an index in two folders."""

import subprocess
import sys
from pathlib import Path

import pytest
from deploy.package_index import environment_of, write_index

ROOT = Path(__file__).resolve().parents[2]
_RUN = "import sys; from quiet_pip import run_pip; sys.exit(0 if run_pip(sys.argv[1:]) else 3)"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    write_index(tmp_path)
    return tmp_path


def _download(index: Path, script: list[str], *packages: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with pip's arguments to download ``packages`` out of ``index``."""
    return subprocess.run(
        [sys.executable, *script, "download", "--quiet", "--dest", str(index / "down"), *packages],
        cwd=ROOT / "deploy/setup",
        env=environment_of(index),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_package_that_is_in_one_folder_only_is_no_warning(index: Path) -> None:
    assert "neither a file nor a directory" in _download(index, ["-m", "pip"], "first", "second").stderr
    done = _download(index, ["-c", _RUN], "first", "second")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert len(list((index / "down").iterdir())) == 2


def test_an_error_is_shown_and_fails(index: Path) -> None:
    done = _download(index, ["-c", _RUN], "first", "third")
    assert done.returncode == 3
    assert "ERROR: No matching distribution found for third" in done.stderr
    assert "neither a file nor a directory" not in done.stderr

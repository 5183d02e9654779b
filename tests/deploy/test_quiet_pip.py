"""What the set-up shows of pip's output, with an index in two folders."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
_RUN = "import sys; from quiet_pip import run_pip; sys.exit(0 if run_pip(sys.argv[1:]) else 3)"
_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Two folders of an index. Each has a package that the other one lacks."""
    for place, name in (("one", "first"), ("two", "second")):
        folder = tmp_path / place / name
        folder.mkdir(parents=True)
        with ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}-1.0.dist-info/METADATA", _METADATA.format(name=name))
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        (folder / "index.html").write_text(f'<a href="{name}-1.0-py3-none-any.whl">{name}</a>')
    return tmp_path


def _download(index: Path, script: list[str], *packages: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` with pip's arguments to download ``packages`` out of ``index``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (index / "one").as_uri(),
        "PIP_EXTRA_INDEX_URL": (index / "two").as_uri(),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    return subprocess.run(
        [sys.executable, *script, "download", "--quiet", "--dest", str(index / "down"), *packages],
        cwd=ROOT / "deploy/setup",
        env=environment,
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

"""Environments of their own for what the tests run, out of an index in two folders."""

import subprocess
import sys
from pathlib import Path

from deploy.package_index import environment_of, write_index
from deploy.tools import ROOT


def set_up(folder: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    """Set up ``folder``/environment with packages of the index in ``folder``."""
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{package}==1.0\n" for package in packages))
    return subprocess.run(
        [sys.executable, ROOT / "deploy/setup/environment.py", folder / "environment", requirements],
        env=environment_of(folder),
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_environment_has_its_packages_and_no_other(tmp_path: Path) -> None:
    write_index(tmp_path)
    assert set_up(tmp_path, "first").returncode == 0
    done = set_up(tmp_path, "second")
    assert (done.returncode, done.stderr) == (0, "")
    (packages,) = tmp_path.glob("environment/lib/python3*/site-packages")
    assert {path.name for path in packages.iterdir()} == {"second.py", "second-1.0.dist-info"}
    subprocess.run([tmp_path / "environment/bin/python", "-c", "import second"], check=True)


def test_a_package_that_is_missing_is_an_error(tmp_path: Path) -> None:
    write_index(tmp_path)
    done = set_up(tmp_path, "first", "third")
    assert done.returncode == 1
    assert "No matching distribution found for third==1.0" in done.stderr
    assert done.stderr.endswith("requirements.txt; the reason is above\n")

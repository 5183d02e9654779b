"""What make runs to set up."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
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


def test_an_environment_of_a_python_that_is_missing_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "deploy/setup/environment.py"), str(tmp_path), "needs.txt", "python0.9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: needs.txt needs python0.9, which does not run here\n")


def test_packages_of_npm_without_node_are_an_error(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "deploy/setup/node_packages.py"), str(tmp_path / "packages"), "agents"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, "error: agents needs Node 20 or later with npm, see nodejs.org\n")
    assert not (tmp_path / "packages").exists()


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


SETUP = Path(__file__).parents[2] / "deploy" / "setup"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SETUP))
    spec = importlib.util.spec_from_file_location("install", SETUP / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wheel_of_another_build_replaces_the_one_that_is_installed(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "VENV", tmp_path)
    old, new = (tmp_path / build / "llama_cpp_python-1.0-py3-none-any.whl" for build in ("old", "new"))
    assert not install.is_installed(old)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    record = tmp_path / "lib" / python / "site-packages" / "llama_cpp_python-1.0.dist-info" / "direct_url.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"url": old.as_uri(), "archive_info": {}}))
    assert install.is_installed(old)
    assert not install.is_installed(new)


def test_an_environment_whose_setup_was_interrupted_is_made_anew(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "environment"
    monkeypatch.setattr(install, "VENV", venv)
    monkeypatch.setattr(install, "CREATED", venv / ".created")
    upgrades: list[str] = []

    def interrupted(_: list[str], what: str) -> None:
        upgrades.append(what)
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install.create_environment()
    (venv / "bin" / "python").unlink()
    monkeypatch.setattr(install, "install", lambda _, what: upgrades.append(what))
    for _ in range(2):
        install.create_environment()
    assert upgrades == ["upgrading pip"] * 2
    subprocess.run([venv / "bin" / "python", "-m", "pip", "--version"], check=True, capture_output=True)


@pytest.mark.parametrize(
    "name",
    [
        "deploy/setup/install.py",
        "shard/caravan_shard/llama_wheel.py",
        "shard/kernels/llama.cmake",
        "shard/kernels/sources.cmake",
        "shard/kernels/include/row.h",
        "shard/kernels/src/abi.c",
    ],
)
def test_make_sets_up_again_once_what_is_compiled_has_changed(name: str) -> None:
    command = ["make", "--dry-run", "--what-if", name, ".venv/.installed"]
    done = subprocess.run(command, cwd=SETUP.parents[1], capture_output=True, text=True, check=True)
    assert "deploy/setup/install.py" in done.stdout

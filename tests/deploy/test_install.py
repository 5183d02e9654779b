"""What the set-up of the environment installs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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

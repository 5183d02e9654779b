"""What the set-up of the environment installs."""

import importlib.util
import json
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

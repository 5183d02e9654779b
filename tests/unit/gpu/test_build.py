"""The build stops when its time is over, and its products are linked to where the package and the peers are."""

import sys
import time
from pathlib import Path

import pytest
from gpu.kit import build
from gpu.kit.job import Job, KitError, UnfinishedError

WITH_TIME = Job(rehearsal=True, until=time.time() + 3600)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("BUILD", "UNPACKED", "VENV"):
        monkeypatch.setattr(build, name, tmp_path / name.lower())
    monkeypatch.setattr(build, "peers_dir", lambda version: tmp_path / "peers" / version)
    monkeypatch.setattr(build, "pinned_version", lambda: "1.0")
    return tmp_path


def test_a_build_is_interrupted_when_the_time_is_over(folders: Path) -> None:
    """Not killed: ninja removes half-written files when it is interrupted."""
    program = (
        f"import os, pathlib, time\nos.chdir({str(folders)!r})\n"
        "try:\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    pathlib.Path('interrupted').touch()\n"
    )

    class Begun(Job):
        def left_s(self) -> float:
            return 0.0 if (folders / "begun").exists() else 20.05

    with pytest.raises(UnfinishedError, match="the build is at"):
        build._logged([sys.executable, "-c", program], {}, Begun(rehearsal=True, until=0.0))
    assert (folders / "interrupted").exists()


def test_the_end_of_the_log_says_why_a_build_failed() -> None:
    program = "print('compiling'); print('error: no such type'); raise SystemExit(2)"
    with pytest.raises(KitError, match=r"(?s)ended with 2.*compiling\nerror: no such type"):
        build._logged([sys.executable, "-c", program], {}, WITH_TIME)


def test_the_package_and_the_peers_get_what_was_built(folders: Path) -> None:
    packages = folders / "venv" / "lib" / "python3.12" / "site-packages"
    packages.mkdir(parents=True)
    (folders / "unpacked" / "llama_cpp").mkdir(parents=True)
    (folders / "unpacked" / "llama_cpp" / "__init__.py").touch()
    programs = folders / "build" / "bin"
    programs.mkdir(parents=True)
    (programs / "libllama.so.0").touch()
    (programs / "llama-server").touch(mode=0o755)
    (programs / "llama-batched-bench").touch(mode=0o755)
    for _ in range(2):  # a build that goes on finds the links of the last one
        build._place()
    assert (packages / "llama_cpp" / "__init__.py").is_file()
    assert (packages / "llama_cpp" / "lib" / "libllama.so.0").resolve() == programs / "libllama.so.0"
    assert (folders / "peers" / "1.0" / "bin" / "llama-server").resolve() == programs / "llama-server"
    assert (folders / "venv" / ".installed").exists()

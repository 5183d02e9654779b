"""The wheel of llama-cpp-python with the kernels: built once for each kind, by the pip of an environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from caravan_shard.llama_wheel import BuildError, built_wheel, check_compiler, kernel_sources, pinned_requirement

_REQUIREMENT = "llama-cpp-python==1.2.3"
# Stands for Python with pip. It notes what it is called with.
_PYTHON = """#!/bin/sh
folder={folder}
case "$*" in
*"cache dir") echo "$folder/cache" ;;
*wheel*)
    echo "$* with $CMAKE_ARGS" >> "$folder/calls"
    echo "[1/2] one"
    test -e "$folder/fails" && exit 1
    while [ "$1" != --wheel-dir ]; do shift; done
    touch "$2/llama_cpp_python-1.2.3-py3-none-any.whl" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    program = tmp_path / "python"
    program.write_text(_PYTHON.format(folder=tmp_path))
    program.chmod(0o755)
    return program


def calls(python: Path) -> list[str]:
    return (python.parent / "calls").read_text().splitlines()


def test_a_wheel_is_built_from_source_with_the_kernels_and_once_only(python: Path) -> None:
    wheel = built_wheel(python, _REQUIREMENT, python.parent)
    assert wheel.is_relative_to(python.parent / "cache" / "caravan")
    assert built_wheel(python, _REQUIREMENT, python.parent) == wheel
    (call,) = calls(python)
    assert f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={kernel_sources() / 'llama.cmake'} -DGGML_RPC=ON" in call
    assert "--no-binary llama-cpp-python" in call
    assert not list(wheel.parent.parent.glob("*.log"))


def test_other_flags_are_another_wheel(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built_wheel(python, _REQUIREMENT, python.parent)
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert built_wheel(python, _REQUIREMENT, python.parent).parent != first.parent
    assert [call.endswith("-DGGML_RPC=ON -DGGML_CUDA=on") for call in calls(python)] == [False, True]


def test_a_build_that_fails_leaves_its_output_and_no_wheel(python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (python.parent / "fails").touch()
    with pytest.raises(BuildError, match=r"all of it in .*\.log") as raised:
        built_wheel(python, _REQUIREMENT, python.parent)
    assert Path(str(raised.value).rpartition(" in ")[2]).read_text() == capsys.readouterr().err == "[1/2] one\n"
    (python.parent / "fails").unlink()
    assert built_wheel(python, _REQUIREMENT, python.parent).is_file()


def test_a_missing_compiler_is_named_before_anything_is_built(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the stand-in needs: neither a compiler nor anything else.
    monkeypatch.setenv("PATH", str(python.parent))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"apt-get install g\+\+"):
        check_compiler()
    with pytest.raises(BuildError, match=r"apt-get install g\+\+"):
        built_wheel(python, _REQUIREMENT, python.parent)
    assert not (python.parent / "calls").exists()


@pytest.mark.parametrize(
    "text", ['shard = ["llama-cpp-python==1.2.3", "numpy>=2"]', "llama-cpp-python==1.2.3; extra == 'shard'\nnumpy"]
)
def test_the_version_is_the_one_that_is_required(text: str) -> None:
    assert pinned_requirement(text) == _REQUIREMENT
    with pytest.raises(BuildError, match="no version of llama-cpp-python is required"):
        pinned_requirement(text.replace("==", ">="))


def test_the_module_needs_the_standard_library_alone() -> None:
    code = "import sys; sys.path.append(sys.argv[1]); import caravan_shard.llama_wheel"
    shard = str(kernel_sources().parent)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, shard], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""The wheel has all that router, shard and library need, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = {
    "caravan",
    "caravan_dialects",
    "caravan_models",
    "caravan_proto",
    "caravan_router",
    "caravan_scheduler",
    "caravan_serve",
    "caravan_shard",
    "caravan_studio",
}
_GENERATES = """
import caravan, caravan_models, caravan_shard, caravan_proto
import caravan_dialects, caravan_router, caravan_scheduler, caravan_serve, caravan_studio
from caravan import LLM, SamplingParams
modules = (caravan, caravan_models, caravan_shard, caravan_proto, caravan_dialects, caravan_router, caravan_scheduler,
           caravan_serve, caravan_studio)
print(*(module.__file__ for module in modules), sep="\\n")
with LLM("toy.gguf", backend="fake") as llm:
    (output,) = llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (built,) = folder.iterdir()
    return built


def test_the_wheel_has_the_packages_their_types_and_the_programs(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (programs,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == _PACKAGES
    assert {name.partition("/")[0] for name in names if name.endswith("/py.typed")} == _PACKAGES
    assert "caravan_router/http/openapi.json" in names
    licences = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE", "marked.LICENSE", "dompurify.LICENSE"}
    assert {"caravan_studio/page/index.html", "caravan_studio/page/vendor/marked.js"} <= set(names)
    assert {line.partition(" =")[0] for line in programs.splitlines() if " =" in line} == {
        "caravan",
        "caravan-router",
        "caravan-shard",
    }


def test_a_program_runs_on_the_files_of_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _GENERATES],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(tmp_path) for line in done.stdout.split())

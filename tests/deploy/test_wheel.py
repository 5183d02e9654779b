"""The wheel has all that router, shard and library need, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

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

_DRAWS = """
import numpy as np
from caravan_shard.backends.llama.kernels.cpu_libraries import row_library
from caravan_shard.backends.llama.kernels.joint_draw import LlamaJointDraw
from caravan_shard.backends.llama.kernels.joint_logprobs import LlamaJointLogprobs
from caravan_shard.backends.llama.kernels.kernels_abi import check_kernels
from caravan_shard.sampling.joint_draw import Filters, Row

library = row_library()
check_kernels([], library)
LlamaJointLogprobs(library)
greedy = Filters(temperature=0.0, top_k=0.0, typical_p=1.0, top_p=1.0, min_p=0.0, reach=0.0)
row = Row(0, None, 0.5, float("inf"), greedy)
print(*LlamaJointDraw(library, 1)(np.array([[0, 1, 3, 2]], np.float32), [row]))
"""


def test_the_wheel_has_the_packages_their_types_and_the_programs(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (programs,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == _PACKAGES
    assert {name.partition("/")[0] for name in names if name.endswith("/py.typed")} == _PACKAGES
    assert "caravan_router/http/openapi.json" in names
    licences = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    vendored = {f"{name}.LICENSE" for name in ("dompurify", "highlight", "marked", "temml")}
    assert licences == {"LICENSE", "NOTICE", *vendored}
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


def test_the_wheel_has_the_sources_of_the_kernels(wheel: Path) -> None:
    """`caravan build-llama` compiles the same files as `make`."""
    sources = ROOT / "shard" / "kernels"
    compiled = {
        path.relative_to(sources).as_posix()
        for path in (*sources.glob("*.cmake"), *sources.glob("src/*"), *sources.glob("include/*"))
    }
    with ZipFile(wheel) as archive:
        folder = "caravan_shard/kernels/"
        packed = {name.removeprefix(folder) for name in archive.namelist() if name.startswith(folder)}
    assert packed - {".clang-format"} == compiled
    assert {"llama.cmake", "src/flash_attention.c", "include/row.h"} <= packed


def test_the_package_of_kernels_has_what_the_shard_calls(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(ROOT / "shard" / "kernels")], check=True)
    (built,) = tmp_path.iterdir()
    with ZipFile(built) as archive:
        archive.extractall(tmp_path / "installed")
    done = subprocess.run(
        [sys.executable, "-c", _DRAWS],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr

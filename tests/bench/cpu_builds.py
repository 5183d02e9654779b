"""Builds the part of llama.cpp that computes on CPUs as it is built for other processors than this one.

A process that is started with LLAMA_CPP_LIB_PATH as one of the folders loads that build.
"""

import os
import shutil
from pathlib import Path

import llama_cpp

from bench.llama_source import logged, package_source, with_cmake
from bench.paths import peers_dir, pinned_version
from caravan_shard.llama_wheel import kernel_sources

_AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
_AVX512 = (*_AVX2, "AVX512")
# What the compiler may use, by the name of the build. None: everything that this host has.
_FEATURES: dict[str, tuple[str, ...] | None] = {
    "AVX2": _AVX2,
    "AVX-512": _AVX512,
    "AVX-512 VNNI": (*_AVX512, "AVX512_VBMI", "AVX512_VNNI"),
    "native": None,
}
NAMES = tuple(_FEATURES)


def libraries(name: str) -> Path:
    """Return the folder with the libraries of a build in `NAMES`, built if they are missing. Raises BenchError."""
    installed = Path(llama_cpp.__file__).parent / "lib"
    features = _FEATURES[name]
    if features is None:
        return installed
    folder = peers_dir(pinned_version()) / "cpu" / name.replace(" ", "-")
    finished = folder / "lib"
    if finished.is_dir():
        return finished
    built = _built(name, folder, features)
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(installed, unfinished)
    # The package has the library three times, where CMake had made symbolic links.
    for copy in unfinished.glob("libggml-cpu.so*"):
        shutil.copyfile(built, copy)
    unfinished.rename(finished)
    return finished


def _built(name: str, folder: Path, features: tuple[str, ...]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    environment = with_cmake(os.environ.copy())
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environment["PATH"]) else []
    work = folder / "build"
    changes = kernel_sources() / "llama.cmake"
    flags = [f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={changes}", "-DCMAKE_BUILD_TYPE=Release", "-DLLAVA_BUILD=OFF"]
    flags += ["-DGGML_NATIVE=OFF", *(f"-DGGML_{feature}=ON" for feature in features)]
    configure = ["cmake", "-S", str(package_source()), "-B", str(work), *generator, *flags]
    logged(f"configuring {name}", configure, folder / "configure.log", environment)
    compile_ = ["cmake", "--build", str(work), "--target", "ggml-cpu", "-j", str(os.cpu_count() or 1)]
    logged(f"compiling {name}", compile_, folder / "build.log", environment)
    return next(work.rglob("libggml-cpu.so")).resolve()

"""Finds CUDA's compiler, and the libraries of CUDA that a build for its cards links."""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gpu.kit.job import KitError

_USUAL = Path("/usr/local/cuda")
# What CMake calls the libraries that are linked.
_LIBRARIES = {
    "cudart": ("CUDA_CUDART", "CUDA_cudart_LIBRARY"),
    "cublas": ("CUDA_cublas_LIBRARY",),
    "cublasLt": ("CUDA_cublasLt_LIBRARY",),
}
_HEADER = "cublas_v2.h"


def with_compiler(environment: dict[str, str]) -> dict[str, str]:
    """Return ``environment`` with nvcc in its path. Raises KitError if the host has none."""
    path = f"{environment['PATH']}{os.pathsep}{_USUAL / 'bin'}"
    if shutil.which("nvcc", path=path) is None:
        message = "no nvcc: put that of CUDA's toolkit into PATH, or rehearse on the CPU with --rehearsal"
        raise KitError(message)
    return {**environment, "PATH": path}


def flags(environment: dict[str, str]) -> list[str]:
    """Return CMake's flags for a build with CUDA, for the card of this host alone."""
    nvcc = shutil.which("nvcc", path=environment["PATH"])
    assert nvcc is not None
    toolkit = Path(nvcc).resolve().parents[1]
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    # Flash attention for quantised caches takes long to build, and nothing of the kit has such a cache.
    found = ["-DGGML_CUDA=ON", "-DGGML_CUDA_FA_QUANTS=f16-f16", "-DGGML_CUDA_NCCL=OFF"]
    found += ["-DCMAKE_CUDA_ARCHITECTURES=native", *library_flags(toolkit, packages)]
    if not any(toolkit.rglob("libcuda.so")):
        # The stub of the driver's library, which is linked for memory that grows.
        found.append("-DGGML_CUDA_NO_VMM=ON")
    return found


def library_flags(toolkit: Path, packages: Path) -> Iterator[str]:
    """Return CMake's flags for the libraries that are not in the toolkit as CMake looks for them.

    A toolkit may have the compiler alone. Python's packages of CUDA have the libraries too, under names with a version.
    """
    folders = set()
    for name, variables in _LIBRARIES.items():
        if not any(toolkit.rglob(f"lib{name}.so")):
            library = _first(f"lib{name}.so.*", toolkit, packages)
            folders.add(library.parent)
            yield from (f"-D{variable}={library}" for variable in variables)
    if not any(toolkit.rglob(_HEADER)):
        yield f"-DCMAKE_CUDA_FLAGS=-isystem {_first(_HEADER, packages).parent}"
    if folders:
        yield f"-DCMAKE_SHARED_LINKER_FLAGS={' '.join(f'-Wl,-rpath,{folder}' for folder in sorted(folders))}"


def _first(pattern: str, *roots: Path) -> Path:
    for root in roots:
        for path in sorted(root.rglob(pattern)):
            return path
    message = f"no {pattern} in {' or '.join(map(str, roots))}"
    raise KitError(message)


def describe_card() -> str:
    """Return the names and the memory of the cards, as the driver tells them."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        message = f"nvidia-smi tells of no card: {error}"
        raise KitError(message) from error

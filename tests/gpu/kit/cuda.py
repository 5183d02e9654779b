"""Finds CUDA's compiler, and the libraries of CUDA that a build for its cards links."""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gpu.kit.places import KitError

_USUAL = Path("/usr/local/cuda")


def with_compiler(environment: dict[str, str]) -> dict[str, str]:
    """Return ``environment`` with nvcc in its path. Raises KitError if the host has none."""
    path = f"{environment['PATH']}{os.pathsep}{_USUAL / 'bin'}"
    if shutil.which("nvcc", path=path) is None:
        message = "no nvcc: put that of CUDA's toolkit into PATH, or rehearse on the CPU with --rehearsal"
        raise KitError(message)
    return {**environment, "PATH": path}


def flags(environment: dict[str, str]) -> list[str]:
    """Return CMake's flags for a build with CUDA, for the card of this host alone.

    A toolkit may come without cuBLAS, which Python's packages of CUDA have too, and without the stub of the driver.
    """
    nvcc = shutil.which("nvcc", path=environment["PATH"])
    assert nvcc is not None
    toolkit = Path(nvcc).resolve().parents[1]
    # Flash attention for quantised caches takes long to build, and nothing of the kit has such a cache.
    found = ["-DGGML_CUDA=ON", "-DGGML_CUDA_FA_QUANTS=f16-f16", "-DGGML_CUDA_NCCL=OFF"]
    found += ["-DCMAKE_CUDA_ARCHITECTURES=native"]
    if not _has(toolkit, "libcublas.so*"):
        found += _cublas_of_packages()
    if not _has(toolkit, "libcuda.so*"):
        found += ["-DGGML_CUDA_NO_VMM=ON"]
    return found


def describe_card() -> str:
    """Return the names and the memory of the cards, as the driver tells them."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        message = f"nvidia-smi tells of no card: {error}"
        raise KitError(message) from error


def _has(toolkit: Path, pattern: str) -> bool:
    folders = [folder for name in ("lib64", "lib", "targets") if (folder := toolkit / name).is_dir()]
    return any(next(folder.rglob(pattern), None) is not None for folder in folders)


def _cublas_of_packages() -> Iterator[str]:
    root = Path(sysconfig.get_path("purelib")) / "nvidia"
    libraries = {name: next(root.rglob(f"lib{name}.so*"), None) for name in ("cublas", "cublasLt")}
    header = next(root.rglob("cublas_v2.h"), None)
    if header is None or None in libraries.values():
        message = f"neither CUDA's toolkit nor {root} has cuBLAS"
        raise KitError(message)
    for name, library in libraries.items():
        yield f"-DCUDA_{name}_LIBRARY={library}"
    yield f"-DCMAKE_CUDA_FLAGS=-isystem {header.parent}"
    yield f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,{header.parent.parent / 'lib'}"

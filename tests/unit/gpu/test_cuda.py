"""Where a build for CUDA takes its libraries from, when the toolkit has the compiler alone."""

from pathlib import Path

import pytest
from gpu.kit.cuda import library_flags
from gpu.kit.job import KitError

LIBRARIES = ("cudart", "cublas", "cublasLt")


def _touched(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_whole_toolkit_needs_no_flags(tmp_path: Path) -> None:
    toolkit = tmp_path / "cuda"
    _touched(toolkit / "include" / "cublas_v2.h", *(toolkit / "lib64" / f"lib{name}.so" for name in LIBRARIES))
    assert list(library_flags(toolkit, tmp_path / "none")) == []


def test_missing_parts_are_those_of_the_packages(tmp_path: Path) -> None:
    toolkit, packages = tmp_path / "cuda", tmp_path / "nvidia"
    _touched(toolkit / "lib64" / "libcudart.so")
    folder = packages / "cu13" / "lib"
    _touched(packages / "cu13" / "include" / "cublas_v2.h", *(folder / f"lib{name}.so.13" for name in LIBRARIES))
    assert list(library_flags(toolkit, packages)) == [
        f"-DCUDA_cublas_LIBRARY={folder}/libcublas.so.13",
        f"-DCUDA_cublasLt_LIBRARY={folder}/libcublasLt.so.13",
        f"-DCMAKE_CUDA_FLAGS=-isystem {packages}/cu13/include",
        f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-rpath,{folder}",
    ]


def test_what_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(KitError, match=r"no libcudart\.so\.\* in "):
        list(library_flags(tmp_path / "cuda", tmp_path / "nvidia"))

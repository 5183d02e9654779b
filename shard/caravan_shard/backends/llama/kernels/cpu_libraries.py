"""The libraries that may have the functions of `shard/kernels`."""

import ctypes
from functools import cache
from pathlib import Path

import llama_cpp.llama_cpp


def cpu_libraries() -> list[ctypes.CDLL]:
    """Return llama.cpp's own library, which finds what it is linked with, and the loaded backends for CPUs."""
    return [llama_cpp.llama_cpp._lib, *map(ctypes.CDLL, _cpu_backends())]


@cache
def row_library() -> ctypes.CDLL | None:
    """Return the library of the package llama-caravan-kernels, which has the functions for rows alone.

    None if it is not installed.
    """
    try:
        from caravan_kernels import LIBRARY
    except ModuleNotFoundError:
        return None
    return ctypes.CDLL(str(LIBRARY))


def _cpu_backends() -> list[str]:
    """Return the paths of the loaded backends for CPUs that llama.cpp has chosen among several (Linux)."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libggml-cpu" in line})

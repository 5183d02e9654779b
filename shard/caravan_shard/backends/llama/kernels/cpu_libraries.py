"""The libraries that may have what `deploy/setup` adds to llama.cpp's backends for CPUs."""

import ctypes
from pathlib import Path

import llama_cpp.llama_cpp


def cpu_libraries() -> list[ctypes.CDLL]:
    """Return llama.cpp's own library, which finds what it is linked with, and the loaded backends for CPUs."""
    return [llama_cpp.llama_cpp._lib, *map(ctypes.CDLL, _cpu_backends())]


def _cpu_backends() -> list[str]:
    """Return the paths of the loaded backends for CPUs that llama.cpp has chosen among several (Linux)."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libggml-cpu" in line})

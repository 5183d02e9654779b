"""The machine as a table's caption names it."""

import os
import platform
from pathlib import Path


def describe() -> str:
    """Cores and CPU model, nothing else."""
    return f"{os.cpu_count()} cores, {_cpu_model()}"


def load_now() -> float:
    """How busy the machine already is: a run beside others' work is worth little."""
    return os.getloadavg()[0]


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

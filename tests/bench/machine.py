"""What machine this is, and how busy it is."""

import os
import platform
from pathlib import Path


def describe() -> str:
    """Return the number of cores and the CPU model, for captions."""
    return f"{os.cpu_count()} cores, {_cpu_model()}"


def busy_seconds() -> float:
    """Return the CPU time of all processes since boot, time stolen by the hypervisor included."""
    user, nice, system, _idle, _iowait, *rest = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    # The last two fields are guest time, which is already part of user time.
    ticks = sum(map(int, (user, nice, system, *rest[:3])))
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

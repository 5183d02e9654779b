"""How many processor cores this process may compute on."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Return the number of threads that can compute at a time: physical cores, at most the quota of the control groups.

    More threads than a quota allows would all be stopped for the rest of each period, also those that others wait for.
    """
    return max(1, min(physical_cores(), int(quota_cpus())))


def physical_cores() -> int:
    """Number of cores this process may use, hyperthreads counted once: compute-bound work gains nothing from them."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    return max(1, len(cores))


def quota_cpus(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the smallest quota of this process's control group and those above it, in CPUs; without one, all CPUs.

    Reads version 2 of control groups. ``membership`` has the group's path, ``root`` is where groups are mounted.
    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, "cpu.max".
    """
    smallest = float(os.cpu_count() or 1)
    paths = membership.read_text().splitlines() if membership.exists() else []
    for path in (Path(line.removeprefix("0::/")) for line in paths if line.startswith("0::/")):
        for group in (path, *path.parents):
            limit = root / group / "cpu.max"
            quota, _, period = limit.read_text().partition(" ") if limit.exists() else ("max", "", "")
            if quota != "max":
                smallest = min(smallest, int(quota) / int(period))
    return smallest

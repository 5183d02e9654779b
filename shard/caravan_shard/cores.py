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

    Reads both versions of control groups. ``membership`` has the group's paths, ``root`` is where groups are mounted.
    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst, "cpu.max"; Documentation/scheduler/sched-bwc.rst.
    """
    quotas = [float(os.cpu_count() or 1)]
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        own = Path(path.removeprefix("/"))
        for group in (own, *own.parents):
            if not controllers:
                quotas += _quota(root / group / "cpu.max")
            elif "cpu" in controllers.split(","):
                for folder in (root / mount / group for mount in {controllers, "cpu"}):
                    quotas += _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
    return min(quotas)


def _quota(*files: Path) -> list[float]:
    """Return the quota that files of one group say, if there is one: a number, or none, then the period."""
    if not all(file.exists() for file in files):
        return []
    quota, period = " ".join(file.read_text() for file in files).split()
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]

"""The quota of control groups, in files as Linux has them."""

import os
from pathlib import Path

import pytest

from caravan_shard.cores import quota_cpus

ALL = float(os.cpu_count() or 1)


def write_groups(folder: Path, membership: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Write the process's group, and quotas of groups by their paths; return what `quota_cpus` takes."""
    own, root = folder / "cgroup", folder / "groups"
    own.write_text(membership)
    for group, limit in limits.items():
        (root / group).mkdir(parents=True, exist_ok=True)
        if limit.startswith("v1 "):
            _, quota, period = limit.split()
            (root / group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (root / group / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (root / group / "cpu.max").write_text(limit)
    return own, root


@pytest.mark.parametrize(
    ("membership", "limits", "quota"),
    [
        # A container sees its own group as the root.
        ("0::/\n", {"": "50000 100000\n"}, 0.5),
        ("0::/\n", {"": "max 100000\n"}, ALL),
        # A unit of systemd, within a slice that has less.
        (
            "0::/a.slice/b.service\n",
            {"a.slice": "30000 100000\n", "a.slice/b.service": "90000 100000\n"},
            0.3,
        ),
        # The group is not the root, and another container's mount hides its path.
        ("0::/docker/1f\n", {"": "20000 100000\n"}, 0.2),
        # Version 1, whose folder is named by its controllers.
        ("4:cpu,cpuacct:/docker/1f\n3:memory:/\n", {"cpu,cpuacct/docker/1f": "v1 50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/docker/1f\n", {"cpu": "v1 20000 100000"}, 0.2),
        ("1:cpuacct,cpu:/a/b\n0::/\n", {"cpu/a": "v1 30000 50000", "cpu/a/b": "v1 -1 100000"}, 0.6),
        ("2:cpuset:/a\n", {"cpuset/a": "v1 50000 100000"}, ALL),
        # Version 1 beside version 2, which has no controller.
        ("3:cpuset:/\n1:cpu:/\n0::/\n", {}, ALL),
        ("", {}, ALL),
    ],
)
def test_the_smallest_quota_counts(tmp_path: Path, membership: str, limits: dict[str, str], quota: float) -> None:
    assert quota_cpus(*write_groups(tmp_path, membership, limits)) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_cpus(tmp_path / "none", tmp_path) == ALL

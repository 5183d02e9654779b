"""How much memory this process may still take."""

from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that the host and its control groups still have for this process; None if they do not say."""
    found = [_host_available(proc), *_group_rooms(proc, cgroups)]
    rooms = [room for room in found if room is not None]
    return max(0, min(rooms)) if rooms else None


def _host_available(proc: Path) -> int | None:
    text = _read(proc / "meminfo") or ""
    line = next((line for line in text.splitlines() if line.startswith("MemAvailable:")), None)
    return None if line is None else int(line.split()[1]) << 10


def _group_rooms(proc: Path, cgroups: Path) -> list[int | None]:
    """Return the room in the process's group and in every group around it (cgroup v2), or in its group (v1)."""
    rooms = []
    for line in (_read(proc / "self/cgroup") or "").splitlines():
        _number, controllers, path = line.split(":", 2)
        parts = Path(path.lstrip("/"))
        if not controllers:
            rooms += [_room(cgroups / part, "memory.max", "memory.current") for part in (parts, *parts.parents)]
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            rooms += [_room(cgroups / "memory" / part, *names) for part in (parts, Path())]
    return rooms


def _room(folder: Path, limit_name: str, used_name: str) -> int | None:
    limit, used = _read(folder / limit_name), _read(folder / used_name)
    # Without a limit, version 2 says "max".
    if limit is None or used is None or not limit.strip().isdecimal():
        return None
    return int(limit) - int(used) + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """Return the bytes of cached files in a group, which the kernel drops before it refuses memory.

    Active ones count too, as they do for the host: a shard that starts again finds the file of its model among them.
    """
    lines = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    stat = {name: int(value) for name, value in lines}
    # In version 1, those with "total_" include the groups within the group.
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))


def locked_memory(proc: Path = _PROC) -> int:
    """Return the bytes of this process that the host may not swap; 0 if it does not say."""
    return _of_process(proc, "VmLck:")


def own_memory(proc: Path = _PROC) -> int:
    """Return the bytes that this process has written to and still holds; 0 if the host does not say.

    Pages of files do not count.
    """
    return _of_process(proc, "RssAnon:")


def _of_process(proc: Path, name: str) -> int:
    lines = (_read(proc / "self/status") or "").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None

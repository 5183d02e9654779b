"""CPU seconds of processes, from /proc (Linux)."""

import os
from collections.abc import Iterable
from pathlib import Path


class NoSuchProcessError(Exception):
    """A process to watch does not run."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of the processes since their start, all threads included."""
    ticks = 0
    for pid in pids:
        fields = _stat_fields(pid)
        # Fields 14 and 15 of proc(5); the split begins at field 3.
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def with_children(pids: Iterable[int]) -> tuple[int, ...]:
    """Return the processes and all their descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_stat_fields(int(entry.name))[1])
            except NoSuchProcessError:
                continue  # The process ended while /proc was being listed.
            parents.setdefault(parent, []).append(int(entry.name))
    found = list(dict.fromkeys(pids))
    for pid in found:  # The list grows during the loop.
        found += [child for child in parents.get(pid, []) if child not in found]
    return tuple(found)


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on. The second is a name that may contain spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        message = f"process {pid} is not running: pass the pid of a running server"
        raise NoSuchProcessError(message) from error
    return text.rpartition(")")[2].split()

"""The processes that this one has started, on Linux."""

from contextlib import suppress
from pathlib import Path


def children_with(word: str) -> list[int]:
    """Return the ids of those that have ``word`` in their command line."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        # Threads and processes end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (thread / "children").read_text().split())
    return [pid for pid in found if word in command_line(pid)]


def command_line(pid: int) -> str:
    """Return that of a process; nothing if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""

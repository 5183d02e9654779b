"""Files that are read again when they change."""

import os

# Modification time, size and inode: a file that was moved into place may be older than the one it replaced.
FileVersion = tuple[int, int, int]


def file_version(path: str | os.PathLike[str]) -> FileVersion | None:
    """Return what changes whenever the file is replaced or rewritten; None if there is no file at ``path``."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino

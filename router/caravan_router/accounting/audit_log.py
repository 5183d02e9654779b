"""Appends to the audit log. Several routers may append to one file, and others may move it away."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from caravan_router.accounting.chain import START, ends_of, next_line
from caravan_router.accounting.ledger import Ended

_log = logging.getLogger(__name__)
# Longer than any line.
_TAIL_BYTES = 1 << 16


class AuditLogError(Exception):
    """The audit log cannot be read or written."""


def described(ended: Ended, now_s: float) -> dict[str, object]:
    """Return the fields of the line about a request that ended at ``now_s``, in seconds since 1970."""
    account = ended.account
    return {
        "time": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds"),
        "key": account.key,
        "session": account.session,
        "model": account.model,
        "kind": account.kind.value,
        "request": ended.request_id,
        "status": ended.status,
        **{f"{name}_tokens": count for name, count in ended.counts._asdict().items() if name != "requests"},
    }


class AuditLog:
    """The file at ``path``. A new one continues the chain of the one that was moved away while this process runs."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; blocks. Raises AuditLogError."""
        self._path = path
        self._head = START
        self._size = 0
        try:
            self._file = self._open()
            with _Locked(self._file):
                self._catch_up()
        except OSError as error:
            raise AuditLogError(f"{path}: {error.strerror}") from error

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, entries: Iterable[dict[str, object]]) -> None:
        """Write a line for each of ``entries``, all or none of them; blocks. Raises OSError."""
        self._follow_file()
        with _Locked(self._file):
            self._catch_up()
            head, lines = self._head, list[bytes]()
            for fields in entries:
                line, head = next_line(head, fields)
                lines.append(line)
            content = b"".join(lines)
            try:
                if os.pwrite(self._file, content, self._size) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, self._size)
                raise
            self._head, self._size = head, self._size + len(content)

    def _follow_file(self) -> None:
        """Begin a new file, or go on with another router's, if the one that was opened was moved or deleted."""
        with suppress(FileNotFoundError):
            found, opened = os.stat(self._path), os.fstat(self._file)
            if (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino):
                return
        with _Locked(self._file):
            # Another router may have written its last lines meanwhile.
            self._catch_up()
        file = self._open()
        os.close(self._file)
        self._file, self._size = file, 0

    def _catch_up(self) -> None:
        """Find the head, if another router has written, or this one has not yet. A line that is cut off is removed."""
        size = os.fstat(self._file).st_size
        if size == self._size:
            return
        first = max(0, size - _TAIL_BYTES)
        tail = os.pread(self._file, size - first, first)
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            _log.warning("the last line of the audit log was cut off and is removed", extra={"path": str(self._path)})
            os.ftruncate(self._file, first + len(whole))
        if whole:
            ends = ends_of(whole[whole.rfind(b"\n", 0, -1) + 1 :])
            # If it was changed, the verifier finds that.
            self._head = self._head if ends is None else ends[1]
        self._size = first + len(whole)

    def close(self) -> None:
        """Close the file. What was written stays."""
        os.close(self._file)


class _Locked:
    """Keeps other routers from writing for the block, which takes microseconds."""

    def __init__(self, file: int) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

"""A compressed file of lines that a thread of its own writes, so that the event loop only makes the lines."""

import gzip
import logging
import os
import queue
import stat
import threading
import time
import zlib
from pathlib import Path

_log = logging.getLogger(__name__)

# After a crash, the file is complete up to the last of these moments.
_FLUSH_S = 1.0
# A fast level: it leaves about a tenth more than the usual one.
_LEVEL = 1


class LineFile:
    """``written_bytes``: the size of the file so far.

    A disk that is full, or another failure, ends the file; ``failed`` is true from then on.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, or empty it. Only its owner may read it: it may hold what users wrote. Raises OSError."""
        self._raw = open(path, "wb", opener=_open_private)  # noqa: SIM115  `_run` closes it
        self._path = path
        self._file = gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=self._raw, mtime=0)
        self._lines: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        # Each is of one thread: both could not add to one number without losing some.
        self._put_bytes = 0
        self._taken_bytes = 0
        self.written_bytes = 0
        self.failed = False
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Return the size of the lines that are not written yet."""
        return self._put_bytes - self._taken_bytes

    def write(self, lines: list[bytes]) -> None:
        """Write lines soon."""
        self._put_bytes += sum(map(len, lines))
        self._lines.put(lines)

    def end(self) -> None:
        """Write what is left, soon."""
        self._lines.put(None)

    def wait(self) -> None:
        """Wait until the file is complete, after its `end`."""
        self._thread.join()

    def _run(self) -> None:
        flushed_s = time.monotonic()
        while True:
            try:
                lines = self._lines.get(timeout=_FLUSH_S)
            except queue.Empty:
                lines = []
            if lines is None:
                break
            if self.failed:
                continue
            try:
                self._file.write(b"".join(lines))
                if (now := time.monotonic()) - flushed_s >= _FLUSH_S:
                    flushed_s = now
                    self._file.flush(zlib.Z_SYNC_FLUSH)
                    self.written_bytes = self._raw.tell()
            except OSError as error:
                self._fail(error)
            self._taken_bytes += sum(map(len, lines))
        self._close()

    def _close(self) -> None:
        """Write what is in buffers. A disk that is full is told once, and the file is closed all the same."""
        for close in (self._file.close, self._raw.close):
            try:
                close()
            except OSError as error:
                if not self.failed:
                    self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failed = True
        _log.error("a recording cannot be written", extra={"file": str(self._path), "reason": str(error)})


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        # It may have been there before.
        os.fchmod(descriptor, 0o600)
    return descriptor

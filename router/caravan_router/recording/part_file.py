"""A compressed file of lines that a thread of its own writes, so that the event loop only makes the lines."""

import gzip
import logging
import os
import queue
import threading
import time
import zlib
from pathlib import Path

_log = logging.getLogger(__name__)

# After a crash, the file is complete up to the last of these moments.
_FLUSH_S = 1.0
# A fast level: it leaves about a tenth more than the usual one.
_LEVEL = 1


class PartFile:
    """``written_bytes``: the size of the file so far.

    A disk that is full, or another failure, ends the file; ``failed`` is true from then on.
    """

    def __init__(self, path: Path) -> None:
        """Create the file, or empty it. Raises OSError."""
        # It may have what users wrote.
        self._raw = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
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
        try:
            self._write_all()
            if not self.failed:
                self._file.close()
        except OSError as error:
            self._fail(error)
        try:
            self._raw.close()
        except OSError as error:
            # What was buffered could not be written either.
            if not self.failed:
                self._fail(error)

    def _write_all(self) -> None:
        """Write until the `end`."""
        flushed_s = time.monotonic()
        while True:
            try:
                lines = self._lines.get(timeout=_FLUSH_S)
            except queue.Empty:
                lines = []
            if lines is None:
                return
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

    def _fail(self, error: OSError) -> None:
        self.failed = True
        _log.error("a recording cannot be written", extra={"file": str(self._path), "reason": str(error)})

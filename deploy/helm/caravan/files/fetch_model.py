"""Download a file and check its SHA-256, unless it is there: fetch_model.py URL SHA256 PATH.

A download that is cut off continues where it stopped, also in the next run. A file whose sum was right is not read
again in later runs; its size and time are noted beside it.
"""

import hashlib
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

_PART = 1 << 20
_TRIES = 10
_MOST_PAUSE_S = 30.0
_SILENCE_S = 60.0


def fetch(url: str, sha256: str, target: Path) -> None:
    """Make ``target`` the file with this sum. Raises ValueError if the server has another one, OSError if it fails."""
    note = target.with_name(f"{target.name}.checked")
    if target.exists() and note.exists() and note.read_text() == _state(target, sha256):
        print(f"{target} is there", flush=True)
        return
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial")
        _download(url, partial)
        _check(partial, sha256)
        partial.rename(target)
    else:
        _check(target, sha256)
    note.write_text(_state(target, sha256))
    print(f"{target} has the right sum", flush=True)


def _download(url: str, partial: Path) -> None:
    for attempt in range(_TRIES):
        try:
            _continue(url, partial)
            return
        except OSError as error:
            if attempt == _TRIES - 1 or (isinstance(error, urllib.error.HTTPError) and error.code < 500):
                raise
            print(f"cut off: {error}", flush=True)
            time.sleep(min(_MOST_PAUSE_S, 2.0**attempt))


def _continue(url: str, partial: Path) -> None:
    """Append what ``partial`` lacks. Raises OSError."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        reply = urllib.request.urlopen(request, timeout=_SILENCE_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # the file has no more bytes
            return
        raise
    with reply, partial.open("ab" if reply.status == 206 else "wb") as file:
        length = reply.headers["Content-Length"]
        print(f"fetching {url}: {length} bytes after {file.tell()}", flush=True)
        missing = None if length is None else int(length)
        while part := reply.read(_PART):
            file.write(part)
            if missing is not None:
                missing -= len(part)
        if missing:
            raise ConnectionError(f"{missing} bytes did not come")
        file.flush()
        os.fsync(file.fileno())


def _check(path: Path, sha256: str) -> None:
    """Remove ``path`` and raise ValueError if it has another sum."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise ValueError(f"the file has the SHA-256 {found}, not {sha256}")


def _state(path: Path, sha256: str) -> str:
    status = path.stat()
    return f"{sha256} {status.st_size} {status.st_mtime_ns}"


if __name__ == "__main__":
    try:
        fetch(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except (OSError, ValueError) as error:
        sys.exit(f"fetch_model: {error}")

"""Download files and check their SHA-256, unless they are there: fetch_model.py URL SHA256 PATH [URL SHA256 PATH]...

A download that is cut off continues where it stopped, also in the next run. A file whose sum was right is not read
again in later runs; its size and time are noted beside it. Of several runs with one folder, each waits for the one that
downloads.

DOWNLOAD_TOKEN is sent to the URL's own origin, as `Authorization: Bearer`. Proxies and authorities come from the usual
variables: HTTPS_PROXY, HTTP_PROXY, NO_PROXY, SSL_CERT_FILE.
"""

import email.message
import fcntl
import hashlib
import http.client
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_PART = 1 << 20
_TRIES = 10
_MOST_PAUSE_S = 30.0
_SILENCE_S = 60.0


class _TokenForItsOrigin(urllib.request.HTTPRedirectHandler):
    """Follows redirects. Storage that a hub redirects to must not see the hub's token, and refuses it."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: email.message.Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Return the next request; it has the token if it goes where the last one went."""
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if following is not None and token is not None and _origin(newurl) == _origin(req.full_url):
            following.add_unredirected_header("Authorization", token)
        return following


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc


def _open(request: urllib.request.Request) -> http.client.HTTPResponse:
    if token := os.environ.get("DOWNLOAD_TOKEN", "").strip():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    opened: http.client.HTTPResponse = urllib.request.build_opener(_TokenForItsOrigin).open(request, timeout=_SILENCE_S)
    return opened


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block, of all that share the folder."""
    with (folder / ".fetch_model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
            if attempt == _TRIES - 1 or _is_final(error):
                raise
            print(f"cut off: {error}", flush=True)
            time.sleep(min(_MOST_PAUSE_S, 2.0**attempt))


def _is_final(error: OSError) -> bool:
    """Whether another try would end the same way: the server refuses, or is not one that is trusted."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code < 500
    return isinstance(error, urllib.error.URLError) and isinstance(error.reason, ssl.SSLCertVerificationError)


def _continue(url: str, partial: Path) -> None:
    """Append what ``partial`` lacks. Raises OSError."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        reply = _open(request)
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


def _refused_by(error: Exception, url: str) -> str:
    """Return where a redirect had led, without its query, which may hold a signature; empty if there was none."""
    if not isinstance(error, urllib.error.HTTPError) or not error.url or error.url == url:
        return ""
    return f", which redirects to {error.url.partition('?')[0]}"


def main() -> None:
    """Fetch what the command line names."""
    words = iter(sys.argv[1:])
    for url, sha256, path in zip(words, words, words, strict=True):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent):
            try:
                fetch(url, sha256, target)
            except (OSError, ValueError) as error:
                sys.exit(f"fetch_model: {url}{_refused_by(error, url)}: {error}")


if __name__ == "__main__":
    main()

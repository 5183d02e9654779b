"""Downloads files by their URLs and checks their SHA-256, for folders that several hosts may share.

A download that is cut off continues where it stopped, in the next run too. A file whose digest was right is not read
again: its size and time are noted beside it. Of several runs with one folder, each waits for the one that downloads.
"""

import fcntl
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status

from caravan_models import azure_blobs, object_store
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import is_passing, network_failure
from caravan_models.progress import FetchStage, Meter, OnProgress
from caravan_models.transfer import Patience, Source, bring, digest_of

_TOKEN = "DOWNLOAD_TOKEN"


@dataclass(frozen=True, slots=True)
class _Store:
    """``http_url`` takes the URL of an object and the environment. ``variables``: what to check if it is refused."""

    http_url: Callable[[str, Mapping[str, str]], str]
    variables: str


_STORES = {
    object_store.SCHEME: _Store(object_store.object_url, "AWS_ACCESS_KEY_ID and AWS_REGION"),
    azure_blobs.SCHEME: _Store(azure_blobs.blob_url, "AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY"),
}
_SHA256 = re.compile("[0-9a-f]{64}")
_TOTAL = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)")
_PARTIAL, _WHOLE, _NO_SUCH_RANGE = 206, 200, 416


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file that is to be at ``path``. ``sha256``: as lower-case hexadecimals."""

    url: str
    sha256: str
    path: Path


def wanted_file(url: str, sha256: str, path: str) -> WantedFile:
    """Return what an operator asks for. Raises FetchError."""
    if urlsplit(url).scheme not in {"http", "https", *_STORES}:
        raise FetchError(
            FetchProblem.BAD_REFERENCE, f"a file comes from a URL of http, https, s3 or az. Given: {url!r}"
        )
    if not _SHA256.fullmatch(sha256.lower()):
        raise FetchError(FetchProblem.BAD_REFERENCE, f"a SHA-256 has 64 hexadecimal digits. Given: {sha256!r}")
    return WantedFile(url, sha256.lower(), Path(path))


def download_file(wanted: WantedFile, on_progress: OnProgress, patience: Patience | None = None) -> None:
    """Return when the file is there, with its digest. Raises FetchError, OSError."""
    wanted.path.parent.mkdir(parents=True, exist_ok=True)
    note = wanted.path.with_name(f"{wanted.path.name}.checked")
    with _alone(wanted.path.parent):
        if wanted.path.exists():
            if note.exists() and note.read_text() == _state(wanted):
                return
            if (found := digest_of(wanted.path)) != wanted.sha256:
                wanted.path.unlink()
                raise FetchError(
                    FetchProblem.WRONG_DIGEST,
                    f"{wanted.path} had the SHA-256 {found}, not {wanted.sha256}; it is removed, try again",
                )
        else:
            partial = wanted.path.with_name(f"{wanted.path.name}.partial")
            _download(wanted, partial, on_progress, patience or Patience())
            partial.rename(wanted.path)
        note.write_text(_state(wanted))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time into the block, of all that share the folder."""
    with (folder / ".caravan-pull.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _state(wanted: WantedFile) -> str:
    status = wanted.path.stat()
    return f"{wanted.sha256} {status.st_size} {status.st_mtime_ns}"


def _download(wanted: WantedFile, partial: Path, on_progress: OnProgress, patience: Patience) -> None:
    try:
        # Its default context trusts SSL_CERT_FILE in addition to the authorities of the system.
        with httpx2.Client(follow_redirects=True, verify=ssl.create_default_context()) as client:
            store = _STORES.get(urlsplit(wanted.url).scheme)
            url = wanted.url if store is None else store.http_url(wanted.url, os.environ)
            headers = _headers("" if store is not None else os.environ.get(_TOKEN, "").strip())
            source = Source(
                url=url,
                headers=headers,
                size=_size(client, url, headers, patience),
                digest=wanted.sha256,
                label=wanted.url,
                magic=b"",
                session=lambda: client,
            )
            meter = Meter(source.size, on_progress)

            def tell(stage: FetchStage, done: int) -> None:
                meter.tell(stage, wanted.path.name, wanted.sha256, done, source.size)

            bring(source, partial, patience, tell)
    except HfHubHTTPError as error:
        raise FetchError(FetchProblem.REFUSED, _refusal(error.response, wanted.url)) from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise network_failure(error, wanted.url) from error
    # What is noted as checked has to survive a power cut.
    with partial.open("rb") as file:
        os.fsync(file.fileno())


def _headers(token: str) -> dict[str, str]:
    """Return what every request has. The HTTP client does not send the token on to other hosts."""
    return {"accept-encoding": "identity", **({"authorization": f"Bearer {token}"} if token else {})}


def _size(client: httpx2.Client, url: str, headers: Mapping[str, str], patience: Patience) -> int:
    """Return the size of the file. Storage behind signed URLs refuses HEAD, so it is asked for one byte."""
    for attempt in range(patience.tries):
        try:
            with client.stream(
                "GET", url, headers={**headers, "range": "bytes=0-0"}, timeout=patience.silence_s
            ) as reply:
                return _size_in(reply, url)
        except (HfHubHTTPError, httpx2.TransportError) as error:
            if attempt == patience.tries - 1 or not is_passing(error):
                raise
            patience.pause(attempt)
    raise AssertionError("the last try returns or raises")


def _size_in(reply: httpx2.Response, url: str) -> int:
    found = ""
    if reply.status_code in {_PARTIAL, _NO_SUCH_RANGE}:
        total = _TOTAL.fullmatch(reply.headers.get("content-range", ""))
        found = total[1] if total else ""
    elif reply.status_code == _WHOLE:
        found = reply.headers.get("content-length", "")
    else:
        hf_raise_for_status(reply)
    if not found.isdecimal():
        place = url.partition("?")[0]
        raise FetchError(FetchProblem.WRONG_SIZE, f"the server does not say how large {place} is; use another one")
    return int(found)


def _refusal(reply: httpx2.Response, url: str) -> str:
    """Return what a server refuses, without the query of where it redirected to, which may hold a signature."""
    final = str(reply.url)
    store = _STORES.get(urlsplit(url).scheme)
    key, how = (_TOKEN, "which redirects to") if store is None else (store.variables, "which is at")
    place = f", {how} {final.partition('?')[0]}," if final != url else ""
    return f"{url}{place} answers with status {reply.status_code}; check the URL, and {key} if it needs one"

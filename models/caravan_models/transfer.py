"""Brings the bytes of one file here, after those that are here already.

Bytes are written at their own place in a file that is named after its content. So a process that dies at any byte loses
what it has not written, which is a part of one chunk, and two processes that write one file because their locks do not
work write the same bytes.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub.utils import get_session, hf_raise_for_status

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.listing import size_text
from caravan_models.progress import FetchStage

_PARTIAL, _WHOLE, _NO_SUCH_RANGE = 206, 200, 416
# Of storage that a hub redirects to: the URL has expired, and a new one comes from the hub.
_AGAIN = frozenset({401, 403, 404, 408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_BLOCK = 1 << 22
SHA256_LENGTH = 64

Tell = Callable[[FetchStage, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """``silence_s``: seconds without a byte after which a connection counts as lost. ``pause_s``: before the first of
    ``tries`` that follow a failed one; each pause is twice as long as the one before.
    """

    silence_s: float = 30.0
    pause_s: float = 1.0
    tries: int = 6

    def pause(self, attempt: int) -> None:
        """Wait after try number ``attempt``, counted from 0, has failed."""
        time.sleep(self.pause_s * 2**attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a file comes from, how large it is, and its digest. ``label`` goes into messages.

    ``digest``: of 64 digits, the SHA-256 of its bytes; of 40, Git's SHA-1 of a header and its bytes, by which hubs name
    small files. ``magic``: how a file begins that is worth downloading. ``session``: returns the HTTP client.
    """

    url: str
    headers: Mapping[str, str]
    size: int
    digest: str
    label: str
    magic: bytes = b"GGUF"
    session: Callable[[], httpx2.Client] = get_session


class _CutOff(Exception):
    """The connection ended early, or the server answered with nothing of use. It can be tried again."""


def bring(source: Source, partial: Path, patience: Patience, tell: Tell) -> None:
    """Make ``partial`` the whole source, with the right digest. ``tell`` gets the number of bytes that are here.

    Raises FetchError, and HfHubHTTPError for what a server refuses.
    """
    kept = partial.exists() and partial.stat().st_size > 0
    found = _brought(source, partial, patience, tell)
    if found != source.digest and kept:
        # What was here before may have been damaged, by a power cut or a full disk.
        partial.unlink()
        found = _brought(source, partial, patience, tell)
    if found != source.digest:
        partial.unlink()
        raise FetchError(
            FetchProblem.WRONG_DIGEST,
            f"{source.label} has the digest {found}, not {source.digest}: it was damaged on its way, or changed; it is "
            "removed, try again",
        )


def _brought(source: Source, partial: Path, patience: Patience, tell: Tell) -> str:
    """Transfer what is missing, and return the digest of all."""
    transfer(source, partial, patience, lambda done: tell(FetchStage.DOWNLOADING, done))
    tell(FetchStage.CHECKING, source.size)
    return digest_of(partial, is_sha256=len(source.digest) == SHA256_LENGTH)


def digest_of(path: Path, *, is_sha256: bool = True) -> str:
    """Return the SHA-256 of a file, or the digest by which Git names it. Raises OSError."""
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(usedforsecurity=False)
    if not is_sha256:
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def transfer(source: Source, partial: Path, patience: Patience, on_bytes: Callable[[int], None]) -> None:
    """Make ``partial`` as long as the source. ``on_bytes`` gets the number of bytes that are here.

    Raises FetchError if the connection fails ``patience.tries`` times without a byte, and HfHubHTTPError for what the
    server refuses.
    """
    with _opened(partial) as descriptor:
        done = os.fstat(descriptor).st_size
        if done > source.size:
            os.ftruncate(descriptor, 0)
            done = 0
        failures = 0
        while done < source.size:
            before = done
            try:
                done = _continue(source, descriptor, done, patience, on_bytes)
            except _CutOff as error:
                done = os.fstat(descriptor).st_size
                failures = 0 if done > before else failures + 1
                if failures == patience.tries:
                    raise FetchError(
                        FetchProblem.CUT_OFF,
                        f"{source.label} was cut off after {size_text(done)} of {size_text(source.size)}, and "
                        f"{failures} tries brought no more ({error}); try again later, it continues there",
                    ) from error
                if failures:
                    patience.pause(failures - 1)
        if done > 0:
            _check_magic(source, descriptor)


@contextmanager
def _opened(partial: Path) -> Iterator[int]:
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _continue(source: Source, descriptor: int, done: int, patience: Patience, on_bytes: Callable[[int], None]) -> int:
    """Write what the next request brings; return the bytes that are here then, which is all. Raises _CutOff."""
    try:
        with source.session().stream(
            "GET",
            source.url,
            headers={**source.headers, "range": f"bytes={done}-{source.size - 1}"},
            timeout=patience.silence_s,
        ) as reply:
            place = _place(source, reply, done)
            on_bytes(done)
            for chunk in reply.iter_raw():
                _write(descriptor, chunk[: source.size - place], place)
                place += len(chunk)
                if place - len(chunk) < len(source.magic) <= place:
                    _check_magic(source, descriptor)
                if place > source.size:
                    break
                on_bytes(place)
    except httpx2.TooManyRedirects:
        raise
    except (httpx2.TransportError, httpx2.StreamError) as error:
        raise _CutOff(str(error) or type(error).__name__) from error
    if place != source.size:
        if place > source.size:
            raise FetchError(
                FetchProblem.WRONG_SIZE,
                f"{source.label} is longer than the {source.size:,} bytes that were announced; try again later",
            )
        raise _CutOff("the connection was closed early")
    return place


def _place(source: Source, reply: httpx2.Response, done: int) -> int:
    """Return the place of the first byte of the reply's body. Raises _CutOff, FetchError or HfHubHTTPError."""
    if reply.status_code == _PARTIAL:
        found = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
        if found is None or int(found[1]) != done:
            raise _CutOff(f"another range came than was asked for: {reply.headers.get('content-range')!r}")
        if found[2] != "*" and int(found[2]) != source.size:
            raise FetchError(
                FetchProblem.WRONG_SIZE,
                f"{source.label} has {int(found[2]):,} bytes, not {source.size:,} as was announced; try again later",
            )
        return done
    if reply.status_code == _WHOLE:
        return 0
    if reply.status_code == _NO_SUCH_RANGE:
        raise FetchError(
            FetchProblem.WRONG_SIZE,
            f"{source.label} is shorter than the {source.size:,} bytes that were announced; try again later",
        )
    of_storage = bool(reply.history)
    if reply.status_code in _AGAIN and (of_storage or reply.status_code >= 500):
        raise _CutOff(f"status {reply.status_code}")
    hf_raise_for_status(reply)
    raise _CutOff(f"status {reply.status_code}")


def _check_magic(source: Source, descriptor: int) -> None:
    """End a download of something else at its first bytes."""
    if os.pread(descriptor, len(source.magic), 0) != source.magic:
        begin = os.pread(descriptor, 16, 0)
        os.ftruncate(descriptor, 0)
        raise FetchError(
            FetchProblem.NOT_GGUF,
            f"{source.label} is no GGUF file, it begins with {begin!r}; choose another file, or check HF_ENDPOINT",
        )


def _write(descriptor: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, place)
        place += written
        view = view[written:]

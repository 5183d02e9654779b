"""Brings the bytes of one file here, after those that are here already.

Bytes are written at their own place in a file that is named after its content. So a process that dies at any byte loses
what it has not written, which is a part of one chunk, and two processes that write one file because their locks do not
work write the same bytes.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub.utils import get_session, hf_raise_for_status

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub import HubSettings
from caravan_models.listing import size_text

_MAGIC = b"GGUF"
_PARTIAL, _WHOLE, _NO_SUCH_RANGE = 206, 200, 416
# Of storage that a hub redirects to: the URL has expired, and a new one comes from the hub.
_AGAIN = frozenset({401, 403, 404, 408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a file comes from, and how large it is. ``label`` goes into messages."""

    url: str
    headers: Mapping[str, str]
    size: int
    label: str


class _CutOff(Exception):
    """The connection ended early, or the server answered with nothing of use. It can be tried again."""


def transfer(source: Source, partial: Path, settings: HubSettings, on_bytes: Callable[[int], None]) -> None:
    """Make ``partial`` as long as the source. ``on_bytes`` gets the number of bytes that are here.

    Raises FetchError if the connection fails ``settings.tries`` times without a byte, and HfHubHTTPError for what the
    hub refuses.
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
                done = _continue(source, descriptor, done, settings, on_bytes)
            except _CutOff as error:
                done = os.fstat(descriptor).st_size
                failures = 0 if done > before else failures + 1
                if failures == settings.tries:
                    raise FetchError(
                        FetchProblem.CUT_OFF,
                        f"{source.label} was cut off after {size_text(done)} of {size_text(source.size)}, and "
                        f"{failures} tries brought no more ({error}); try again later, it continues there",
                    ) from error
                if failures:
                    settings.pause(failures - 1)
        if done > 0 and os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            raise _no_gguf(source, descriptor)


@contextmanager
def _opened(partial: Path) -> Iterator[int]:
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _continue(
    source: Source, descriptor: int, done: int, settings: HubSettings, on_bytes: Callable[[int], None]
) -> int:
    """Write what the next request brings; return the bytes that are here then, which is all. Raises _CutOff."""
    try:
        with get_session().stream(
            "GET",
            source.url,
            headers={**source.headers, "range": f"bytes={done}-{source.size - 1}"},
            timeout=settings.silence_s,
        ) as reply:
            place = _place(source, reply, done)
            on_bytes(done)
            for chunk in reply.iter_raw():
                _write(descriptor, chunk[: source.size - place], place)
                place += len(chunk)
                if place >= len(_MAGIC) and place - len(chunk) < len(_MAGIC):
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
                f"{source.label} is longer than the {source.size:,} bytes that the hub lists; try again later",
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
                f"{source.label} has {int(found[2]):,} bytes, not the {source.size:,} of the hub's list; try later",
            )
        return done
    if reply.status_code == _WHOLE:
        return 0
    if reply.status_code == _NO_SUCH_RANGE:
        raise FetchError(
            FetchProblem.WRONG_SIZE,
            f"{source.label} is shorter than the {source.size:,} bytes that the hub lists; try again later",
        )
    of_storage = bool(reply.history)
    if reply.status_code in _AGAIN and (of_storage or reply.status_code >= 500):
        raise _CutOff(f"status {reply.status_code}")
    hf_raise_for_status(reply)
    raise _CutOff(f"status {reply.status_code}")


def _check_magic(source: Source, descriptor: int) -> None:
    """End a download of something else at its first bytes."""
    if os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
        raise _no_gguf(source, descriptor)


def _no_gguf(source: Source, descriptor: int) -> FetchError:
    begin = os.pread(descriptor, 16, 0)
    os.ftruncate(descriptor, 0)
    return FetchError(
        FetchProblem.NOT_GGUF,
        f"{source.label} is no GGUF file, it begins with {begin!r}; choose another file, or check HF_ENDPOINT",
    )


def _write(descriptor: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, place)
        place += written
        view = view[written:]

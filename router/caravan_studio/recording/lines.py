"""The lines of a recording: JSON objects, each with one field that says what it is. The file is compressed by gzip.

A recording may come from anybody: nothing in it is executed.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from caravan_scheduler.config import SchedulerConfig
from caravan_studio.recording.events import Event

# A recording of another version is refused.
VERSION = 2
# A recording is read in pieces of this size, and no line is longer than this.
_PIECE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 28
_GZIP = 16 + zlib.MAX_WBITS
_INFINITE_BY_NAME = frozenset(field.name for field in fields(SchedulerConfig) if field.type in (float, "float"))


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. ``at`` on the router's clock is ``unix`` in Unix time. ``tokens``: "numbered" or "real"."""

    version: int
    release: str
    at: float
    unix: float
    tokens: str


class SchedulerLine(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler begins, with no request and no shard. Limits that are infinite are null in ``config``."""

    id: int
    model: str
    config: dict[str, Any]


class Told(msgspec.Struct, frozen=True):
    """The tokens of a prefix that events of a scheduler have named by number: ``keys`` are lengths and numbers."""

    scheduler: int
    namespace: int
    adapter: str
    tokens: list[int]
    keys: list[tuple[int, int]]


class CallLine(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a scheduler heard at once, and what it decided then."""

    scheduler: int
    at: float
    events: list[Event]
    actions: list[list[Any]]


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of its fields is set. ``page`` is a message of the timeline, which only a page reads.

    ``ended``: why the recording ends there, although the router went on.
    """

    caravan_recording: Header | None = None
    scheduler: SchedulerLine | None = None
    call: CallLine | None = None
    told: Told | None = None
    ended: str | None = None
    page: msgspec.Raw | None = None


def config_of(config: SchedulerConfig) -> dict[str, Any]:
    """Return a configuration as JSON can have it."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return {name: None if value == math.inf else value for name, value in plain.items()}


def read_config(plain: dict[str, Any]) -> SchedulerConfig:
    """Return a scheduler's configuration. Raises msgspec.ValidationError."""
    if unknown := plain.keys() - {field.name for field in fields(SchedulerConfig)}:
        raise msgspec.ValidationError(f"there is no {', '.join(sorted(unknown))}")
    known = {name: math.inf if value is None and name in _INFINITE_BY_NAME else value for name, value in plain.items()}
    return msgspec.convert(known, SchedulerConfig)


class RecordingError(Exception):
    """The file is no recording that this version can play, or is damaged."""


class _Version(msgspec.Struct):
    version: int


class _AnyHeader(msgspec.Struct):
    caravan_recording: _Version


class RecordingFile:
    """``is_cut``: whether the end is missing, as after a crash. ``ended``: why the recording ended before the router.

    Both are known when all lines have been read.
    """

    def __init__(self, path: Path) -> None:
        """Open a recording and read its header. Raises RecordingError, OSError."""
        self._path = path
        self.is_cut = False
        self.ended: str | None = None
        first = next(self._raw_lines(), b"")
        try:
            version = msgspec.json.decode(first, type=_AnyHeader).caravan_recording.version
        except msgspec.DecodeError as error:
            raise RecordingError("it does not begin as a recording does") from error
        if version != VERSION:
            raise RecordingError(f"it has version {version} of the format, and this program reads version {VERSION}")
        header = _line(first, 1).caravan_recording
        assert header is not None, "its version was read"
        self.header: Header = header

    def lines(self) -> Iterator[Line]:
        """Yield the lines after the header, but for what only a page reads. Raises RecordingError, OSError."""
        for number, line in enumerate(self._raw_lines(), 1):
            if number > 1 and not line.startswith(b'{"page":'):
                read = _line(line, number)
                self.ended = read.ended
                yield read

    def told(self) -> Iterator[Told]:
        """Yield what later lines tell of earlier ones. Raises RecordingError, OSError."""
        for number, line in enumerate(self._raw_lines(), 1):
            if line.startswith(b'{"told":') and (told := _line(line, number).told) is not None:
                yield told

    def _raw_lines(self) -> Iterator[bytes]:
        """Yield whole lines up to the place where the file ends or is cut off."""
        rest = b""
        unpack = zlib.decompressobj(_GZIP)
        with self._path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                while piece:
                    try:
                        data = unpack.decompress(piece, _PIECE_BYTES << 4)
                    except zlib.error as error:
                        raise RecordingError(f"it is no gzip file, or it is damaged: {error}") from error
                    piece = unpack.unconsumed_tail
                    *lines, rest = (rest + data).split(b"\n")
                    yield from lines
                    if len(rest) > _LONGEST_LINE:
                        raise RecordingError("a line is too long")
        self.is_cut = not unpack.eof or bool(rest + unpack.flush())


def _line(line: bytes, number: int) -> Line:
    try:
        return msgspec.json.decode(line, type=Line)
    except msgspec.DecodeError as error:
        raise RecordingError(f"line {number}: {error}") from error

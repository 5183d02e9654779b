"""Reads the lines of a recording, which may come from anybody: nothing in it is executed."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from caravan_studio.recording.lines import VERSION, Header, Line, Told

# A recording is read in pieces of this size, and no line is longer than this.
_PIECE_BYTES = 1 << 16
_LONGEST_LINE = 1 << 28
_GZIP = 16 + zlib.MAX_WBITS


class RecordingError(Exception):
    """The file is no recording that this version can play, or is damaged."""


class _Version(msgspec.Struct):
    version: int


class _AnyHeader(msgspec.Struct):
    caravan_recording: _Version


class RecordingFile:
    """``is_cut``: whether the end is missing, as after a crash; known when all lines have been read."""

    def __init__(self, path: Path) -> None:
        """Open a recording and read its header. Raises RecordingError, OSError."""
        self._path = path
        self.is_cut = False
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
                yield _line(line, number)

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

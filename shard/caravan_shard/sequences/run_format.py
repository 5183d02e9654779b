"""The bytes of a saved run, in a file or on their way to another shard.

    8 bytes magic and version, u32 CRC-32 of all that follows, u32 number of cuts, u64 bytes of the state, u32 start,
    32 bytes fingerprint, u32 bytes of the note, a u32 for each cut, a key of 16 bytes for each cut, the note, the state

The checksum is CRC-32: it must find accidents, not forgeries, and zlib computes 4 GB/s where the functions of hashlib
compute 0.8 (BLAKE2b) to 1.4 (SHA-256).
"""

import struct
import zlib

import numpy as np

from caravan_shard.arrays import State
from caravan_shard.protocol.commands import StoredRun

_MAGIC = b"CRVNRUN2"
_HEAD = struct.Struct("<8sI")
_REST = struct.Struct("<IQI32sI")
_CUT_BYTES = 4
_KEY_BYTES = 16
_MAX_CUTS = 1 << 20
# A note has some bytes for each token of its run. A message of a list of runs can have the longest one.
MAX_NOTE_BYTES = 1 << 23
# The part of the header whose size does not depend on the run.
FIXED_BYTES = _HEAD.size + _REST.size


def _header_bytes(cuts: int, note_bytes: int) -> int:
    return FIXED_BYTES + cuts * (_CUT_BYTES + _KEY_BYTES) + note_bytes


class BadRunError(Exception):
    """These bytes are broken or belong to something else."""


class RunFormat:
    """Writes and reads runs whose cells only those can use who have the same ``fingerprint``."""

    def __init__(self, fingerprint: str) -> None:
        """``fingerprint``: 64 hexadecimal digits."""
        self._fingerprint = bytes.fromhex(fingerprint)

    def header(self, run: StoredRun, state: State) -> bytes:
        """Return what precedes the state."""
        rest = b"".join(
            (
                _REST.pack(len(run.cuts), state.nbytes, run.start, self._fingerprint, len(run.note)),
                struct.pack(f"<{len(run.cuts)}I", *run.cuts),
                *run.keys,
                run.note,
            )
        )
        return _HEAD.pack(_MAGIC, zlib.crc32(state.data, zlib.crc32(rest))) + rest

    def sizes(self, fixed: bytes | memoryview) -> tuple[int, int]:
        """Return the bytes of the header and of the state, from the first FIXED_BYTES. Raises BadRunError."""
        if len(fixed) < FIXED_BYTES or bytes(fixed[: len(_MAGIC)]) != _MAGIC:
            raise BadRunError("no header")
        count, size, _, fingerprint, note_bytes = _REST.unpack_from(fixed, _HEAD.size)
        if fingerprint != self._fingerprint or not 0 < count <= _MAX_CUTS or note_bytes > MAX_NOTE_BYTES:
            raise BadRunError("another fingerprint")
        return _header_bytes(count, note_bytes), size

    def run(self, header: bytes) -> StoredRun:
        """Return the run of a whole header. Raises BadRunError."""
        header_bytes, size = self.sizes(header)
        if len(header) != header_bytes:
            raise BadRunError("truncated")
        count, _, first, _, note_bytes = _REST.unpack_from(header, _HEAD.size)
        table, note = header[FIXED_BYTES : header_bytes - note_bytes], header[header_bytes - note_bytes :]
        cuts = struct.unpack_from(f"<{count}I", table)
        keys = [table[at : at + _KEY_BYTES] for at in range(count * _CUT_BYTES, len(table), _KEY_BYTES)]
        has_no_cells = cuts == (first,)
        if list(cuts) != sorted({*cuts}) or (cuts[0] <= first and not has_no_cells):
            raise BadRunError("cuts that do not ascend")
        return StoredRun(start=first, cuts=cuts, keys=tuple(keys), size=size, note=note)

    def state(self, data: State, run: StoredRun) -> State:
        """Return the state within all bytes of ``run``. Raises BadRunError."""
        header_bytes = _header_bytes(len(run.cuts), len(run.note))
        if len(data) != header_bytes + run.size:
            raise BadRunError("another size")
        magic, checksum = _HEAD.unpack_from(data.data)
        if magic != _MAGIC or checksum != zlib.crc32(data.data[_HEAD.size :]):
            raise BadRunError("the checksum is wrong")
        return data[header_bytes:]


class RunReceiver:
    """Puts the parts of a run together, in which it comes from another shard."""

    def __init__(self, run_format: RunFormat, key: bytes, most_bytes: int) -> None:
        """``key``: of the run that is expected. ``most_bytes``: the size of the largest state to accept."""
        self._format = run_format
        self._key = key
        self._most_bytes = most_bytes
        self._start = b""
        self._header_bytes = 0
        self._data: State | None = None
        self._filled = 0

    def add(self, part: bytes) -> None:
        """Take the next part. Raises BadRunError."""
        if self._data is None:
            self._start += part
            if len(self._start) < FIXED_BYTES:
                return
            self._header_bytes, size = self._format.sizes(self._start)
            if size > self._most_bytes:
                raise BadRunError(f"{size} bytes, where there is room for {self._most_bytes}")
            self._data = np.empty(self._header_bytes + size, np.uint8)
            part, self._start = self._start, b""
        end = self._filled + len(part)
        if end > len(self._data):
            raise BadRunError("more bytes than the header says")
        self._data[self._filled : end] = np.frombuffer(part, np.uint8)
        self._filled = end

    def finish(self) -> tuple[StoredRun, State]:
        """Return the run and its state. Raises BadRunError unless all is there and unchanged."""
        if self._data is None or self._filled < len(self._data):
            raise BadRunError("truncated")
        run = self._format.run(self._data[: self._header_bytes].tobytes())
        if run.key != self._key:
            raise BadRunError("another run")
        return run, self._format.state(self._data, run)

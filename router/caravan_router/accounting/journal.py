"""The counts of a running router in a file, so that they survive its being killed.

Each row has a slot of 512 bytes: its counts, which only grow, and what it counts. A slot is overwritten after each step
that changes it, before the step's tokens are sent to clients. What was written is the system's: a killed process loses
none of it, a host that loses power what the store has not either.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from caravan_dialects.auth.usage import Account, Counts
from caravan_router.accounting.ledger import Row

SLOTS = 4096
_SLOT_BYTES = 512
_COUNTS = struct.Struct(f"<{len(Counts._fields)}Q")
# Of what is counted: its checksum and its length.
_HEAD = struct.Struct("<IH")
_NAME_AT = _COUNTS.size + _HEAD.size
_MOST_NAME = _SLOT_BYTES - _NAME_AT


class Journal:
    """The journal of this process, which is locked as long as it lives."""

    def __init__(self, path: Path, slots: int = SLOTS) -> None:
        """Begin a journal at ``path``, where no file may be; blocks. Raises OSError."""
        self._path = path
        self._file = _locked(path)
        self._bytes = bytearray(slots * _SLOT_BYTES)
        # Where free slots begin.
        self._free = list(range((slots - 1) * _SLOT_BYTES, -1, -_SLOT_BYTES))

    def write(self, rows: Collection[Row]) -> None:
        """Write the counts of ``rows``, except those that have no slot because all are taken. Raises OSError."""
        first, last = len(self._bytes), -1
        pack, content = _COUNTS.pack_into, self._bytes
        for row in rows:
            at = self._place(row) if row.slot is None else row.slot
            if at >= 0:
                pack(content, at, *row.counts)
                # Not `min` and `max`, which take longer than packing.
                if at < first:
                    first = at
                if at > last:
                    last = at
        if first <= last:
            with memoryview(content) as whole:
                os.pwrite(self._file, whole[first : last + _SLOT_BYTES], first)

    def _place(self, row: Row) -> int:
        """Give ``row`` a slot, and return where that begins; -1 if it gets none."""
        name = msgspec.json.encode(row.account)
        if not self._free or len(name) > _MOST_NAME:
            return -1
        row.slot = at = self._free.pop()
        slot = bytes(_COUNTS.size) + _HEAD.pack(zlib.crc32(name), len(name)) + name
        self._bytes[at : at + _SLOT_BYTES] = slot.ljust(_SLOT_BYTES, b"\0")
        return at

    def release(self, row: Row) -> None:
        """Let another row have the slot of ``row``, which the store has."""
        if row.slot is not None:
            self._free.append(row.slot)
            row.slot = None

    def close(self, *, is_saved: bool) -> None:
        """Unlock the journal, and delete it if its counts are in the store; blocks."""
        if is_saved:
            self._path.unlink(missing_ok=True)
        os.close(self._file)


def _locked(path: Path) -> int:
    """Make the file, which another process may take for abandoned, and delete, before it is locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)


def read_journal(content: bytes) -> Iterator[tuple[Account, Counts]]:
    """Yield what was counted. Slots that are empty or broken, since the host has lost power, are left out."""
    for at in range(0, len(content) - _NAME_AT, _SLOT_BYTES):
        checksum, length = _HEAD.unpack_from(content, at + _COUNTS.size)
        name = content[at + _NAME_AT : at + _NAME_AT + length]
        if length and zlib.crc32(name) == checksum:
            yield msgspec.json.decode(name, type=Account), Counts(*_COUNTS.unpack_from(content, at))


def abandoned(paths: Iterable[Path]) -> Iterator[tuple[Path, bytes]]:
    """Yield the journals of processes that have ended, with their content, each locked until the next. Blocks.

    Raises OSError.
    """
    for path in paths:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # its process has ended meanwhile
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path, path.read_bytes()
        except BlockingIOError:  # its process runs
            continue
        finally:
            os.close(file)

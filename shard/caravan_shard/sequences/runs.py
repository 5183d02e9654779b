"""The store of saved runs: in host memory, then in files."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic

from caravan_proto.messages.limits import SavedBytes
from caravan_shard.arrays import State
from caravan_shard.protocol.commands import StoredRun
from caravan_shard.sequences.run_files import RunFiles
from caravan_shard.sequences.run_format import BadRunError

_log = logging.getLogger(__name__)

# If there are files, one part of the memory in this many is for runs that are being written.
_WRITING_SHARE = 4
# How long `close` writes runs to files, in seconds.
CLOSE_S = 10.0


@dataclass(slots=True, eq=False)
class _Kept:
    """A run, in memory if it has a ``state``. One that ``is_leaving`` memory waits to be written."""

    run: StoredRun
    state: State | None
    is_leaving: bool = False


class RunStore:
    """Saved runs by key, least recently used first. Its bounds hold whatever the router asks for.

    Only the worker's thread changes which runs there are. Any thread may call `find`, `list_runs`, `fetch` and `peek`,
    and read `memory_room`. A thread of the store writes and removes files, in the order of the calls. A run that leaves
    memory stays there until its file is complete, and is forgotten if that fails.
    """

    def __init__(self, memory_bytes: int, files: RunFiles | None = None, disk_bytes: int = 0) -> None:
        """Without ``disk_bytes``, runs are kept in memory alone. With ``files``, those that they hold are kept again.

        With the first and without the second, `use_files` follows. Runs that leave memory wait for it.
        """
        self._files: RunFiles | None = None
        self._writing_bytes = memory_bytes // _WRITING_SHARE if disk_bytes else 0
        self.capacity = SavedBytes(memory=memory_bytes - self._writing_bytes, disk=disk_bytes)
        self._kept: dict[bytes, _Kept] = {}
        self._fetched: dict[bytes, State] = {}
        # Sizes in bytes of the runs in memory, of those leaving memory, and of those in files.
        self._memory = self._leaving = self._disk = 0
        # Protects all of the above.
        self._lock = Lock()
        self._work: SimpleQueue[_Kept | StoredRun | None] = SimpleQueue()
        self._write_until: float | None = None
        self._writer = Thread(target=self._write_all, name="runs", daemon=True)
        if files is not None:
            self.use_files(files, list(files.scan()))

    def use_files(self, files: RunFiles, found: Sequence[StoredRun]) -> None:
        """Keep runs in ``files`` from now on, and again those that were ``found`` there, least recently used first."""
        assert self._files is None, "there are files"
        self._files = files
        excess = sum(run.size for run in found) + self._leaving - self.capacity.disk
        older: dict[bytes, _Kept] = {}
        for run in found:
            if excess > 0 or run.key in self._kept:
                # In the second case, it is in memory again, and is written again.
                excess -= run.size
                files.remove(run)
            else:
                older[run.key] = _Kept(run, None)
        with self._lock:
            self._kept = older | self._kept
            self._disk += sum(kept.run.size for kept in older.values())
        _log.info("found saved runs", extra={"runs": len(older), "mib": self._disk >> 20})
        self._writer.start()

    @property
    def used(self) -> SavedBytes:
        """Bytes of the saved runs. Those that leave memory count as on disk."""
        return SavedBytes(memory=self._memory, disk=self._disk + self._leaving)

    @property
    def memory_room(self) -> int:
        """Size of the largest run that can be put now, in bytes."""
        return self.capacity.memory - self._memory

    def find(self, key: bytes) -> StoredRun | None:
        """Return a run; None if it is unknown."""
        kept = self._kept.get(key)
        return None if kept is None else kept.run

    def list_runs(self) -> list[tuple[StoredRun, bool]]:
        """Return all runs, each with whether it is on disk. A run comes after all that end where it starts."""
        with self._lock:
            runs = [(kept.run, kept.state is None or kept.is_leaving) for kept in self._kept.values()]
        return sorted(runs, key=lambda pair: pair[0].start)

    def put(self, run: StoredRun, state: State) -> None:
        """Keep a run whose key is new and for which there is room."""
        assert run.key not in self._kept, f"run {run.key.hex()} is here"
        assert state.nbytes == run.size <= self.memory_room, f"{run.size} bytes for {self.memory_room}"
        with self._lock:
            self._kept[run.key] = _Kept(run, state)
            self._memory += run.size

    def fetch(self, keys: Iterable[bytes]) -> None:
        """Read files, so that the worker's thread need not wait for them. The next call forgets what this one read."""
        with self._lock:
            self._fetched = {}
            wanted = [kept.run for key in set(keys) if (kept := self._kept.get(key)) is not None and kept.state is None]
        for run in wanted:
            state = self._read_file(run)
            if state is not None:
                with self._lock:
                    self._fetched[run.key] = state

    def peek(self, key: bytes) -> tuple[StoredRun, State] | None:
        """Return a run and its state, for another shard; None if it is unknown or cannot be read."""
        with self._lock:
            kept = self._kept.get(key)
            state = None if kept is None else kept.state
        if kept is None:
            return None
        if state is None:
            state = self._read_file(kept.run)
        return None if state is None else (kept.run, state)

    def read(self, key: bytes) -> tuple[StoredRun, State] | None:
        """Return a run and its state; None if it is unknown, or damaged and thus forgotten."""
        with self._lock:
            kept = self._kept.pop(key, None)
            fetched = self._fetched.pop(key, None)
            if kept is None:
                return None
            # The most recently used run is the last.
            self._kept[key] = kept
            state = kept.state if kept.state is not None else fetched
        if state is None:
            state = self._read_file(kept.run)
        if state is None:
            self.drop([key])
            return None
        return kept.run, state

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget runs; unknown keys are ignored."""
        with self._lock:
            for key in keys:
                kept = self._kept.get(key)
                if kept is not None:
                    self._forget(kept)

    def spill(self, keys: Iterable[bytes]) -> None:
        """Move runs to files; unknown keys are ignored. Runs that there is no room for are forgotten."""
        with self._lock:
            for key in keys:
                kept = self._kept.get(key)
                if kept is not None and kept.state is not None and not kept.is_leaving and not self._leave(kept):
                    self._forget(kept)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is in memory to files, the most recently used first, for at most ``timeout_s``."""
        if self._files is None:
            return
        self._write_until = monotonic() + timeout_s
        with self._lock:
            self._writing_bytes = self.capacity.memory + self._writing_bytes
            for kept in reversed(self._kept.values()):
                if kept.state is not None and not kept.is_leaving:
                    self._leave(kept)
        self._work.put(None)
        self._writer.join(timeout_s)
        if not self._writer.is_alive():
            self._files.close()

    def _leave(self, kept: _Kept) -> bool:
        """Let a run leave memory; False if there is no room for it."""
        size = kept.run.size
        fits_disk = self._disk + self._leaving + size <= self.capacity.disk
        # One may be of any size, so that large runs can be written at all.
        fits_memory = self._leaving == 0 or self._leaving + size <= self._writing_bytes
        if not (fits_disk and fits_memory):
            return False
        kept.is_leaving = True
        self._memory -= size
        self._leaving += size
        self._work.put(kept)
        return True

    def _forget(self, kept: _Kept) -> None:
        del self._kept[kept.run.key]
        size = kept.run.size
        if kept.state is None:
            self._disk -= size
            self._work.put(kept.run)
        elif kept.is_leaving:
            self._leaving -= size
            kept.state = None
        else:
            self._memory -= size

    def _read_file(self, run: StoredRun) -> State | None:
        assert self._files is not None
        try:
            return self._files.read(run)
        except (BadRunError, OSError) as error:
            _log.warning("a saved run cannot be read", extra={"run": run.key.hex(), "error": str(error)})
            return None

    def _write_all(self) -> None:
        assert self._files is not None
        while (work := self._work.get()) is not None:
            if isinstance(work, StoredRun):
                self._files.remove(work)
            elif self._write_until is None or monotonic() < self._write_until:
                self._write(self._files, work)

    def _write(self, files: RunFiles, kept: _Kept) -> None:
        run, state = kept.run, kept.state
        if state is None:
            # Forgotten meanwhile.
            return
        try:
            files.write(run, state)
        except OSError as error:
            _log.warning("a saved run cannot be written and is forgotten", extra={"error": str(error)})
            with self._lock:
                if self._kept.get(run.key) is kept:
                    self._forget(kept)
            return
        with self._lock:
            if self._kept.get(run.key) is kept:
                kept.state, kept.is_leaving = None, False
                self._leaving -= run.size
                self._disk += run.size
                return
        files.remove(run)

"""Saved runs: cells of sequences that outlive them, in host memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from caravan_shard.arrays import State
from caravan_shard.protocol.results import SavedBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The cells [start, end) of a sequence. The last of ``keys`` names the run."""

    start: int
    cuts: Sequence[int]
    keys: Sequence[bytes]
    size: int

    @property
    def key(self) -> bytes:
        """The name of the run."""
        return self.keys[-1]

    @property
    def end(self) -> int:
        """The position behind its last cell."""
        return self.cuts[-1]


@dataclass(frozen=True, slots=True)
class _Kept:
    run: Run
    state: State


class RunStore:
    """Saved runs by key. Only the worker's thread changes it; any thread may call `list_runs`."""

    def __init__(self, memory_bytes: int) -> None:
        self.capacity = SavedBytes(memory=memory_bytes, disk=0)
        self._kept: dict[bytes, _Kept] = {}
        self._memory_bytes = 0
        self._lock = Lock()

    @property
    def used(self) -> SavedBytes:
        """Bytes of the saved runs."""
        return SavedBytes(memory=self._memory_bytes, disk=0)

    @property
    def memory_room(self) -> int:
        """Size of the largest run that can be put now, in bytes."""
        return self.capacity.memory - self._memory_bytes

    def find(self, key: bytes) -> Run | None:
        """Return a run; None if it is unknown."""
        kept = self._kept.get(key)
        return None if kept is None else kept.run

    def list_runs(self) -> list[tuple[Run, bool]]:
        """Return all runs, each with whether it is on disk. A run comes after all that end where it starts."""
        with self._lock:
            kept = list(self._kept.values())
        return sorted(((one.run, False) for one in kept), key=lambda pair: pair[0].start)

    def put(self, run: Run, state: State) -> None:
        """Keep a run whose key is new and for which there is room."""
        assert run.key not in self._kept, f"run {run.key.hex()} is here"
        assert state.nbytes == run.size <= self.memory_room, f"{run.size} bytes for {self.memory_room}"
        with self._lock:
            self._kept[run.key] = _Kept(run, state)
            self._memory_bytes += run.size

    def read(self, key: bytes) -> State | None:
        """Return the state of a run; None if it is unknown or damaged, and forgotten."""
        kept = self._kept.get(key)
        return None if kept is None else kept.state

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget runs; unknown keys are ignored."""
        with self._lock:
            for key in keys:
                kept = self._kept.pop(key, None)
                if kept is not None:
                    self._memory_bytes -= kept.run.size

    def spill(self, keys: Iterable[bytes]) -> None:
        """Move runs to disk; unknown keys are ignored. Without disk, the runs are forgotten."""
        self.drop(keys)

    def close(self) -> None:
        """Forget everything."""

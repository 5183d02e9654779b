"""Saved runs on their way from one shard to another, and how long that takes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from caravan_scheduler.events import SavedRun

# Most transfers for one waiting request: its prefix must not follow it from shard to shard.
MOST_FETCHES = 2
# The first guesses: a call through two processes, and 300 MB/s.
_FIRST_CALL_S = 0.01
_FIRST_BYTE_S = 1 / 300e6
_NEWEST = 0.3
# The time of a smaller transfer tells what a call takes, that of a larger one what bytes take.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copies ``runs`` of the shard ``source`` into the memory of ``target``.

    ``request_id``: the request that waits for it; None if what moves belongs to ended sequences.
    """

    transfer_id: int
    source: str
    target: str
    runs: Sequence[SavedRun]
    request_id: int | None

    @property
    def size_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs)


class Transfers:
    """The transfers under way. A shard fetches one after another, so each waits for those before it."""

    def __init__(self, last_id: int = 0) -> None:
        """``last_id``: the last one that was given before."""
        self._under_way: dict[int, Transfer] = {}
        self._awaited: set[int] = set()
        # By the id of the transfer: keys of runs that were given up since it began, in order.
        self._unwanted: dict[int, dict[bytes, None]] = {}
        self._last_id = last_id
        self._call_s = _FIRST_CALL_S
        self._byte_s = _FIRST_BYTE_S

    @property
    def last_id(self) -> int:
        """The last id that was given."""
        return self._last_id

    @property
    def runs_under_way(self) -> list[SavedRun]:
        """The runs of all transfers under way."""
        return [run for transfer in self._under_way.values() for run in transfer.runs]

    def begin(self, source: str, target: str, runs: Sequence[SavedRun], request_id: int | None = None) -> Transfer:
        """Note a transfer that begins."""
        self._last_id += 1
        transfer = Transfer(transfer_id=self._last_id, source=source, target=target, runs=runs, request_id=request_id)
        self._under_way[transfer.transfer_id] = transfer
        if request_id is not None:
            self._awaited.add(request_id)
        return transfer

    def end(self, transfer_id: int, seconds: float = 0.0) -> Transfer | None:
        """Forget a transfer and learn from its time, 0 if it failed. Return it; None if it is unknown."""
        transfer = self._under_way.pop(transfer_id, None)
        self._unwanted.pop(transfer_id, None)
        if transfer is None:
            return None
        if transfer.request_id is not None:
            self._awaited.discard(transfer.request_id)
        if seconds:
            self._learn(transfer.size_bytes, seconds)
        return transfer

    def _learn(self, size_bytes: int, seconds: float) -> None:
        if size_bytes < _SMALL_BYTES:
            self._call_s += _NEWEST * (seconds - self._call_s)
        else:
            self._byte_s += _NEWEST * (max(0.0, seconds - self._call_s) / size_bytes - self._byte_s)

    def lose(self, shard: str) -> None:
        """Forget the transfers to a shard that is gone. No request waits any more for those from it.

        Some of their runs may have come: the target says so when its call ends.
        """
        for transfer in list(self._under_way.values()):
            if transfer.target == shard:
                self.end(transfer.transfer_id)
            elif transfer.source == shard and transfer.request_id is not None:
                self._awaited.discard(transfer.request_id)
                self._under_way[transfer.transfer_id] = replace(transfer, request_id=None)

    def note_flush(self, shard: str, key: bytes | None) -> None:
        """Note that of what ``shard`` fetches now the run with this key, or None for all, is not wanted any more."""
        for transfer_id, transfer in self._under_way.items():
            if transfer.target == shard:
                keys = dict.fromkeys(run.key for run in transfer.runs) if key is None else {key: None}
                self._unwanted.setdefault(transfer_id, {}).update(keys)

    def unwanted_keys(self, transfer_id: int) -> Collection[bytes]:
        """Return the keys of the runs that a transfer brings, or not, and that are not wanted any more."""
        return self._unwanted.get(transfer_id, ())

    def is_awaited_by(self, request_id: int) -> bool:
        """Whether a request waits for a transfer."""
        return request_id in self._awaited

    def involve(self, shard: str) -> bool:
        """Whether a transfer from or to ``shard`` is under way."""
        return any(shard in (one.source, one.target) for one in self._under_way.values())

    def seconds(self, target: str, size_bytes: int) -> float:
        """Return the expected time until ``target`` has fetched ``size_bytes`` more."""
        before = sum(one.size_bytes for one in self._under_way.values() if one.target == target)
        return self._call_s + (before + size_bytes) * self._byte_s

    def bytes_within(self, seconds: float) -> int:
        """Return how many bytes a shard can be expected to fetch within ``seconds``."""
        return int(max(0.0, seconds - self._call_s) / self._byte_s)

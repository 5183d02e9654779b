"""The interface through which the engine reports what it does; the metrics implement it."""

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from caravan_scheduler.actions import Preemption, Start
from caravan_scheduler.config import JoinReason
from caravan_scheduler.events import Stepped


class Method(Enum):
    """The RPC that a step belongs to. The values are metric labels."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUse:
    """The use of a shard: running sequences take ``used_cells``, ended ones ``cached_cells``.

    Saved runs take ``memory_bytes`` and ``disk_bytes``, those that hold pinned prefixes ``pinned_bytes`` of these.
    ``adapters``: those of running sequences, "" for the model itself.
    """

    shard: str
    used_cells: int
    cached_cells: int
    total_cells: int
    memory_bytes: int
    disk_bytes: int
    pinned_bytes: int
    sequences: int
    adapters: Set[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUse:
    """This many requests wait; the cells of ``swapped`` of them are saved.

    ``oldest_s``: seconds since the arrival of the oldest request that has not started yet, 0 without any.
    ``adapters``: those that waiting requests name, "" for the model itself; ``max_adapters``: how many there are.
    ``wanted_shards``: how many shards the load needs, see `caravan_scheduler.planning.wanted_shards`.
    """

    requests: int
    swapped: int
    oldest_s: float
    adapters: Set[str] = frozenset()
    max_adapters: int = 0
    wanted_shards: float = 0.0

    def __add__(self, other: "QueueUse") -> "QueueUse":
        return QueueUse(
            requests=self.requests + other.requests,
            swapped=self.swapped + other.swapped,
            oldest_s=max(self.oldest_s, other.oldest_s),
            adapters=self.adapters | other.adapters,
            max_adapters=max(self.max_adapters, other.max_adapters),
            wanted_shards=self.wanted_shards + other.wanted_shards,
        )


class EngineObserver(Protocol):
    """Called on the event loop; must not block."""

    def step(self, step: Stepped, method: Method, overhead_s: float) -> None:
        """A step succeeded. ``overhead_s``: time since the last step ended, less the time of the forward pass."""

    def step_failed(self, method: Method) -> None: ...

    def admitted(self, requests: int) -> None:
        """One command started this many waiting requests."""

    def joined(self, reason: JoinReason) -> None:
        """Requests started beside others that run."""

    def filtered(self, duration_s: float) -> None:
        """A FilterBatch took this many seconds."""

    def shard_use(self, use: ShardUse) -> None: ...

    def shard_lost(self) -> None:
        """A shard was given up, neither drained nor given to another router."""

    def shard_gone(self, shard: str) -> None:
        """The router holds this shard no longer, whatever the reason."""

    def model_gone(self) -> None:
        """The model is no longer known. Nothing that is observed afterwards counts."""

    def started(self, start: Start) -> None:
        """A request started, with some of its prompt in the cache."""

    def resumed(self, computed_again: int) -> None:
        """A request that had lost its cells starts again; ``computed_again`` of its tokens are computed once more."""

    def preempted(self, how: Preemption) -> None:
        """A running request gave its cells to others."""

    def faulted(self, *, rebuilt: bool) -> None:
        """The scheduler has met a bug. ``rebuilt``: it has begun anew; else one request has failed."""

    def fetched(self, size_bytes: int, *, complete: bool) -> None:
        """A shard has fetched saved runs of ``size_bytes`` from another; some are missing unless ``complete``."""

    def encoded(self, seconds: float, *, done: bool) -> None:
        """A shard was to encode a medium, which has taken ``seconds``: 0 if it had been encoded before."""

    def queue(self, use: QueueUse) -> None:
        """All that waits for the model now."""

"""What the engine reports while it runs; the metrics implement it."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from caravan_router.scheduling.actions import Preemption
from caravan_router.scheduling.config import JoinReason


class Method(Enum):
    """The RPC a pass belonged to."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One pass of a shard. ``overhead_s``: from the end of the pass before to the end of this one, less the forward."""

    shard: str
    method: Method
    sequences: int
    forward_s: float
    sample_s: float
    total_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUse:
    """What a shard holds now: ``used_cells`` by running sequences, ``cached_cells`` by ended ones."""

    shard: str
    used_cells: int
    cached_cells: int
    total_cells: int
    sequences: int


class EngineObserver(Protocol):
    """Called on the event loop; must not block."""

    def step(self, report: StepReport) -> None: ...

    def step_failed(self, method: Method) -> None: ...

    def admitted(self, requests: int) -> None:
        """So many waiting requests started with one command."""

    def joined(self, reason: JoinReason) -> None:
        """Requests started beside others that run."""

    def filtered(self, duration_s: float) -> None:
        """A FilterBatch took so long."""

    def shard_use(self, use: ShardUse) -> None: ...

    def shard_gone(self, shard: str) -> None: ...

    def swap_space(self, shard: str, used_bytes: int) -> None:
        """What swapped sequences take on the shard."""

    def started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request's prompt starts, with so many of its tokens in the cache."""

    def preempted(self, how: Preemption) -> None:
        """A running request gave its cells to others."""

    def queue_size(self, requests: int, swapped: int) -> None:
        """Requests that wait; of these, ``swapped`` are in a shard's swap space."""

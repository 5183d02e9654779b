"""The configuration of a scheduler, and the clock that its parts share."""

import math
from dataclasses import dataclass
from enum import Enum


class PrefillMode(Enum):
    """How prompts share a shard with decodes."""

    # Steps carry decodes and chunks of prompts within a budget.
    MIXED = "mixed"
    # A step with prompts carries no decodes: they wait.
    PAUSE = "pause"


class JoinReason(Enum):
    """Why waiting requests may join a running batch; the values are TGI's labels."""

    CHUNKING = "chunking"
    BACKPRESSURE = "backpressure"
    WAIT_EXCEEDED = "wait_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Configuration of the scheduler.

    ``target_itl_s``: longest step with decodes, unless prompts lose too much by it (`planning.chunking`).
    ``idle_step_s``: longest step of any kind, so that new requests and cancellations never wait long.
    ``target_ttft_s``, ``target_cell_share``, ``shard_start_s``: the number of shards that is asked for should let
    requests wait no longer for others, use no more of the cells, and serve the load that is expected so much later.
    ``waiting_served_ratio`` and ``max_waiting_tokens`` are TGI's: in pause mode a prefill interrupts the decodes if
    requests waiting >= ratio x running, or after that many steps.
    """

    mode: PrefillMode = PrefillMode.MIXED
    target_itl_s: float = 0.22
    idle_step_s: float = 1.0
    target_ttft_s: float = 2.0
    target_cell_share: float = 0.8
    shard_start_s: float = 120.0
    max_batch_prefill_tokens: int = 4096
    max_batch_size: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    # So many requests may start before one that has no room and is ahead of them.
    max_bypass: int = 32
    # Steps that a shard may run without a new command: so many, or more if these take less time than run_ahead_s.
    run_ahead_steps: int = 64
    run_ahead_s: float = 1.0
    # Without any shard, waiting requests fail after this time.
    no_shard_grace_s: float = 30.0
    # Cells of each shard to use; None: all.
    max_batch_total_tokens: int | None = None
    # Part of a shard's cells that admission leaves free for outputs longer than expected.
    watermark: float = 0.02
    # Ended sequences stay in the cache until their cells are needed.
    prefix_caching: bool = True
    # While other requests come, a step of bulk work carries prompts for so long, so that they wait no longer.
    bulk_step_s: float = 0.02
    # The priority of a waiting request rises by one each time this has passed.
    aging_s: float = 60.0
    # A request that has not started after this time fails.
    queue_timeout_s: float = math.inf
    # A request that loses its cells by failures more often than this, without a token in between, fails as their cause.
    max_losses: int = 3
    # A request fails if this many shards in a row are lost while they compute the same tokens of it, since every shard
    # that computes them may die.
    max_fatal_losses: int = 2


@dataclass(slots=True)
class Clock:
    """The time of the events that are being handled, in seconds. One clock serves all ledgers of a scheduler."""

    now_s: float = 0.0

"""When to prefill, how much of it per pass, and when decodes wait for it."""

import math
from dataclasses import dataclass
from enum import Enum


class PrefillMode(Enum):
    """``MIXED``: prompt chunks ride with the decodes under a budget. ``PAUSE``: a prefill runs alone, decodes wait."""

    MIXED = "mixed"
    PAUSE = "pause"


class JoinReason(Enum):
    """Why waiting requests may join a running batch; the values are TGI's labels."""

    CHUNKING = "chunking"
    BACKPRESSURE = "backpressure"
    WAIT_EXCEEDED = "wait_exceeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The knobs of the scheduler.

    ``target_itl_s``: a pass that carries decodes should not take longer, unless prompts outnumber them.
    ``idle_step_s``: nor should any pass, so that newcomers and cancellations never wait long.
    ``waiting_served_ratio`` and ``max_waiting_tokens`` are TGI's: in pause mode decodes are interrupted if requests
    waiting >= ratio x running, or after that many passes.
    """

    mode: PrefillMode = PrefillMode.MIXED
    target_itl_s: float = 0.22
    idle_step_s: float = 1.0
    max_batch_prefill_tokens: int = 4096
    max_batch_size: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    # Younger requests let past one that does not fit yet, before it is waited for.
    max_bypass: int = 32
    # Passes a shard may run ahead without a new command.
    run_ahead_steps: int = 64
    # Requests wait this long for a shard to come back.
    no_shard_grace_s: float = 30.0
    # Most cells of a shard to use; None: all.
    max_batch_total_tokens: int | None = None
    # Part of the cells that admission leaves free, for outputs longer than expected.
    watermark: float = 0.02
    # Ended sequences stay in the cache until their cells are needed.
    prefix_caching: bool = True
    # A waiting request's priority rises by one each time this long has passed.
    aging_s: float = 60.0
    # A request that has not started after this long fails.
    queue_timeout_s: float = math.inf
    # How often a sequence may lose its cells without a token in between before it is held to be the cause.
    max_losses: int = 3

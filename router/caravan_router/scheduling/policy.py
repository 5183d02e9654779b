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


# Below this a pass is mostly overhead; above it grows by steps that suit the kernels' tiles.
MIN_CHUNK_TOKENS = 16
# The first guess, before any pass was measured: careful while streams run.
_FIRST_CHUNK_TOKENS = 128
_FIRST_CHUNK_BESIDE_DECODES = 32


def pass_seconds(config: SchedulerConfig, *, prompts: int, riders: int) -> float:
    """How long the next pass may take: the target of the decodes in it, stretched as ``prompts`` outnumber them.

    A crowd's time to first token weighs more than the gaps of a few, and larger chunks serve it faster: what TGI's
    waiting_served_ratio says with a full stop of the decodes, said by degrees.
    """
    if not riders:
        return config.idle_step_s
    return min(config.target_itl_s * max(1.0, prompts / riders), max(config.idle_step_s, config.target_itl_s))


def chunk_budget(config: SchedulerConfig, *, tokens_within_target: int | None, riders: int) -> int:
    """Prompt tokens for the next pass beside ``riders`` decodes; at least MIN_CHUNK_TOKENS, so that prefill moves.

    ``tokens_within_target``: what the cost model says fits the time of such a pass, None before it knows.
    """
    if riders and config.mode is PrefillMode.PAUSE:
        return 0
    tokens = tokens_within_target
    if tokens is None:
        tokens = _FIRST_CHUNK_BESIDE_DECODES if riders else _FIRST_CHUNK_TOKENS
    whole_tiles = tokens // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS
    return min(max(whole_tiles, MIN_CHUNK_TOKENS), config.max_batch_prefill_tokens)


def join_reason(config: SchedulerConfig, *, waiting: int, running: int, steps_since_prefill: int) -> JoinReason | None:
    """Why a prefill of waiting requests may pause (or join) the running decodes now; None if it may not."""
    if config.mode is PrefillMode.MIXED:
        return JoinReason.CHUNKING
    if steps_since_prefill >= config.max_waiting_tokens:
        return JoinReason.WAIT_EXCEEDED
    return JoinReason.BACKPRESSURE if waiting >= config.waiting_served_ratio * running else None

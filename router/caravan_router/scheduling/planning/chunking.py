"""How many prompt tokens the next step computes, and when decodes wait for them."""

from caravan_router.scheduling.config import JoinReason, PrefillMode, SchedulerConfig

# A step with fewer prompt tokens is mostly overhead. Above that, steps grow by amounts that suit the kernels' tiles.
MIN_CHUNK_TOKENS = 16
# Prompt tokens of a step before any was measured: fewer while sequences decode.
_FIRST_CHUNK_TOKENS = 128
_FIRST_CHUNK_BESIDE_DECODES = 32


def step_seconds(config: SchedulerConfig, *, prompts: int, riders: int) -> float:
    """Return how long the next step may take: the target of its decodes, stretched as ``prompts`` outnumber them.

    A crowd's time to first token weighs more than the gaps of a few, and larger chunks serve it faster. TGI's
    waiting_served_ratio does the same by stopping the decodes; this does it by degrees.
    """
    if not riders:
        return config.idle_step_s
    return min(config.target_itl_s * max(1.0, prompts / riders), max(config.idle_step_s, config.target_itl_s))


def chunk_budget(config: SchedulerConfig, *, tokens_within_target: int | None, riders: int) -> int:
    """Return the prompt tokens for the next step beside ``riders`` decodes: at least MIN_CHUNK_TOKENS.

    ``tokens_within_target``: what the cost model says fits the time of such a step, None before it knows.
    """
    if riders and config.mode is PrefillMode.PAUSE:
        return 0
    tokens = tokens_within_target
    if tokens is None:
        tokens = _FIRST_CHUNK_BESIDE_DECODES if riders else _FIRST_CHUNK_TOKENS
    whole_tiles = tokens // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS
    return min(max(whole_tiles, MIN_CHUNK_TOKENS), config.max_batch_prefill_tokens)


def join_reason(config: SchedulerConfig, *, waiting: int, running: int, steps_since_prefill: int) -> JoinReason | None:
    """Return why a prefill of waiting requests may pause (or join) the running decodes now; None if it may not."""
    if config.mode is PrefillMode.MIXED:
        return JoinReason.CHUNKING
    if steps_since_prefill >= config.max_waiting_tokens:
        return JoinReason.WAIT_EXCEEDED
    return JoinReason.BACKPRESSURE if waiting >= config.waiting_served_ratio * running else None

"""How many prompt tokens the next step computes, and when decodes wait for them."""

import math
from dataclasses import dataclass

from caravan_router.scheduling.config import JoinReason, PrefillMode, SchedulerConfig
from caravan_router.scheduling.shard.costs import FAST_CHUNK_TOKENS, ShardCosts

# A step with fewer prompt tokens is mostly overhead.
MIN_CHUNK_TOKENS = 16
# A chunk of a size that was not measured lately gets this part of the time less: decodes would wait for a wrong guess.
_DOUBT = 0.2
# Chunks grow by amounts that suit the tiles of the kernels.
_TILE_TOKENS = 8


def step_seconds(config: SchedulerConfig, *, prompts: int, riders: int, decode_s: float) -> float:
    """Return how long the next step may take beside ``riders`` decodes, which alone take ``decode_s``.

    That is the target of the decodes, and more where prompts lose more by it than decodes gain:

    - as prompts outnumber the decodes. A crowd's time to first token weighs more than the gaps of a few, and larger
      chunks serve it faster. TGI's waiting_served_ratio does the same by stopping the decodes; this does it by degrees.
    - where decodes fill most of the target. Prompts get the share of the time that is theirs by heads.
    """
    if not riders:
        return config.idle_step_s
    fair_s = max(config.target_itl_s * prompts / riders, decode_s * (prompts + riders) / riders)
    return max(config.target_itl_s, min(config.idle_step_s, fair_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that may take ``seconds`` beside ``riders`` decodes."""

    seconds: float
    riders: int


def chunk_budget(
    config: SchedulerConfig, costs: ShardCosts, step: Step, *, context: int, remaining: int | None = None
) -> int:
    """Return the prompt tokens for ``step``, at least MIN_CHUNK_TOKENS, of a prompt with ``remaining`` to compute.

    ``context``: the tokens before them. Where the attention of small chunks is slow, the step takes longer than it may,
    by no larger a factor than the prompt gets faster and than fast attention saves; and no small chunk is left over.
    """
    riders = step.riders
    if riders and config.mode is PrefillMode.PAUSE:
        return 0
    tokens = costs.tokens_within(step.seconds, riders=riders, context=context, remaining=remaining)
    if riders and (doubt := costs.doubt(tokens, riders=riders)):
        seconds = step.seconds * (1 - _DOUBT * doubt)
        tokens = costs.tokens_within(seconds, riders=riders, context=context, remaining=remaining)
    tokens = max(tokens // _TILE_TOKENS * _TILE_TOKENS, MIN_CHUNK_TOKENS)
    may_be_fast = remaining is None or remaining >= FAST_CHUNK_TOKENS
    if riders and may_be_fast and tokens < FAST_CHUNK_TOKENS <= costs.most_tokens(riders):
        small_s = costs.seconds(tokens, riders=riders, context=context)
        fast_s = costs.seconds(FAST_CHUNK_TOKENS, riders=riders, context=context)
        pays = tokens * fast_s**2 <= FAST_CHUNK_TOKENS * small_s**2
        if pays and fast_s <= small_s * costs.fast_attention_gain(riders=riders, context=context):
            tokens = FAST_CHUNK_TOKENS
    if remaining is not None and tokens >= FAST_CHUNK_TOKENS:
        tokens = _without_rest(tokens, remaining)
    return min(tokens, config.max_batch_prefill_tokens)


def _without_rest(tokens: int, remaining: int) -> int:
    """Return a size near ``tokens`` that leaves no small chunk of ``remaining`` for the end."""
    if tokens >= 2 * FAST_CHUNK_TOKENS:
        return remaining if tokens < remaining < tokens + FAST_CHUNK_TOKENS else tokens
    chunks = math.ceil(remaining / tokens)
    if chunks > 1 and remaining // chunks < FAST_CHUNK_TOKENS:
        chunks -= 1
    return max(tokens, math.ceil(remaining / chunks))


def join_reason(config: SchedulerConfig, *, waiting: int, running: int, steps_since_prefill: int) -> JoinReason | None:
    """Return why a prefill of waiting requests may pause (or join) the running decodes now; None if it may not."""
    if config.mode is PrefillMode.MIXED:
        return JoinReason.CHUNKING
    if steps_since_prefill >= config.max_waiting_tokens:
        return JoinReason.WAIT_EXCEEDED
    return JoinReason.BACKPRESSURE if waiting >= config.waiting_served_ratio * running else None

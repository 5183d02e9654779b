"""Decides whether a context on CPUs uses flash attention, by measuring both.

llama.cpp's flash attention for CPUs reads the cells of each head one by one. How that compares with two matrix products
depends on the model's heads and on the CPU: behind 600 tokens, SmolLM2-135M (heads of 64) decodes 1.7 times as fast
without it, and gemma-3-270m (heads of 256) 3 % slower. Without it, small chunks of prompts are much faster, and those
of 512 tokens up to a tenth slower.
"""

from collections.abc import Callable
from time import thread_time

import numpy as np

from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.memory import LlamaMemory

# How many tokens are in front of that of a measured step, if a sequence may be so long.
_CONTEXT_TOKENS = 512
# The first one is not measured.
_STEPS = 3
# Flash attention stays unless it is slower than that: it is better for large chunks, and uses less memory.
_MARGIN = 1.05


def is_worth_leaving(with_s: float, without_s: float) -> bool:
    """Whether a step of ``without_s`` without flash attention is better than one of ``with_s`` with it."""
    return with_s > _MARGIN * without_s


def step_seconds(decode: Callable[[TokenBatch], DecodeOutcome], memory: LlamaMemory, longest: int) -> float | None:
    """Return the seconds of a step over one token behind many others; None if that cannot be measured.

    They are processor time of this thread, which must be the one that computes, so that a busy host changes little.
    ``longest``: the most tokens of a sequence. The memory must be empty, and is empty afterwards.
    """
    context = min(_CONTEXT_TOKENS, longest - _STEPS)
    times = []
    try:
        # The time of attention does not depend on the content of cells.
        if decode(_token(0)) is not DecodeOutcome.OK or not memory.fill_cells(0, context):
            return None
        for position in range(context, context + _STEPS):
            started = thread_time()
            if decode(_token(position)) is not DecodeOutcome.OK:
                return None
            times.append(thread_time() - started)
    finally:
        memory.clear()
    return min(times[1:])


def _token(position: int) -> TokenBatch:
    return TokenBatch(
        tokens=np.zeros(1, np.int32),
        positions=np.array([position], np.int32),
        sequence_ids=np.zeros(1, np.int32),
        outputs=np.ones(1, np.int8),
    )

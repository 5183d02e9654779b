"""Tries at the start whether a sequence computes as before after its whole state was saved and restored.

What the numbers of recurrent state mean cannot be checked by their form.
"""

from collections.abc import Callable

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import CellSlice, DecodeOutcome, StartupError, TokenBatch
from caravan_shard.backends.llama.memory import LlamaMemory

_ANY_SIZE = 1 << 62
Decode = Callable[[TokenBatch], DecodeOutcome]
Logits = Callable[[int], Floats]


def what_restoring_changes(memory: LlamaMemory, decode: Decode, logits: Logits) -> str:
    """Save and restore sequence 0, which holds a few tokens. Return what is not as before; empty if all is."""
    length = memory.length(0)
    state = memory.save(0, 0, length, _ANY_SIZE, releasing=False)
    if state is None:
        return "llama.cpp cannot write the state of this model"
    before = _logits_after(length, decode, logits)
    memory.trim(0, 0)
    if not memory.restore(0, [CellSlice(state=state, first=0, start=0, end=length)]):
        return "llama.cpp cannot read the state of this model that it has written"
    if memory.length(0) != length:
        return "a restored state of this model has another length"
    if not np.array_equal(before, _logits_after(length, decode, logits)):
        return "the logits after a restored state of this model are others than before"
    return ""


def _logits_after(position: int, decode: Decode, logits: Logits) -> Floats:
    """Return the logits after one more token of sequence 0."""
    one = np.ones(1, np.int32)
    outcome = decode(TokenBatch(one, one * position, one * 0, np.ones(1, np.int8)))
    if outcome is not DecodeOutcome.OK:
        raise StartupError(f"a forward pass failed ({outcome.value}); see --log-level debug")
    return logits(1).copy()

"""Tries at the start whether a sequence computes as before after its cells and its state were saved and restored.

What the numbers of recurrent state mean cannot be checked by their form.
"""

from collections.abc import Callable

import numpy as np

from caravan_proto.messages.commands import PrefixCopy
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import CellSlice, DecodeOutcome, StartupError, TokenBatch
from caravan_shard.backends.llama.recurrent_memory import RecurrentMemory

_ANY_SIZE = 1 << 62
# With other cells, numbers are added in another order. The logits may differ by this part of their range.
_ROUNDING = 0.01
Decode = Callable[[TokenBatch], DecodeOutcome]
Logits = Callable[[int], Floats]


def what_restoring_changes(memory: RecurrentMemory, decode: Decode, logits: Logits) -> str:
    """Save and restore sequence 0, which holds a few tokens. Return what is not as before; empty if all is."""
    length = memory.length(0)
    slices = _saved(memory, length)
    if slices is None:
        return "llama.cpp cannot write the state of this model"
    before = _logits_after(0, length, decode, logits)
    memory.trim(0, 0)
    if not memory.restore(0, slices):
        return "llama.cpp cannot read the state of this model that it has written"
    if memory.length(0) != length:
        return "a restored state of this model has another length"
    if not np.array_equal(before, _logits_after(0, length, decode, logits)):
        return "the logits after a restored state of this model are others than before"
    if not memory.shares_cells:
        return ""
    # Sequence 0 is longer now, so its own state would be another.
    if not memory.restore(1, slices, PrefixCopy(source_id=0, length=1)) or memory.length(1) != length:
        return "a restored sequence of this model cannot have cells of another"
    shared = _logits_after(1, length, decode, logits)
    if np.abs(shared - before).max() > _ROUNDING * np.ptp(before):
        return "the logits of a restored sequence of this model that has cells of another are others than before"
    return ""


def _saved(memory: RecurrentMemory, length: int) -> list[CellSlice] | None:
    """Save sequence 0, its tokens one by one, as the runs of a prefix are; None if that cannot be done."""
    slices: list[CellSlice] = []
    for start, end in (*((at, at + 1) for at in range(length)), (length, length)):
        state = memory.save(0, start, end, _ANY_SIZE, releasing=False)
        if state is None:
            return None
        slices.append(CellSlice(state=state, first=start, start=start, end=end))
    return slices


def _logits_after(sequence_id: int, position: int, decode: Decode, logits: Logits) -> Floats:
    """Return the logits after one more token of a sequence."""
    one = np.ones(1, np.int32)
    outcome = decode(TokenBatch(one, one * position, one * sequence_id, np.ones(1, np.int8)))
    if outcome is not DecodeOutcome.OK:
        raise StartupError(f"a forward pass failed ({outcome.value}); see --log-level debug")
    return logits(1).copy()

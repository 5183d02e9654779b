"""Parts the tokens of a step, so that how a sequence's sums are rounded does not depend on what else the step has.

Without flash attention, a matrix product for one token rounds otherwise than one for several. In the split layout,
llama.cpp computes as many tokens of each sequence together as the one with the fewest has: beside a decode, the first
token of a chunk would be computed as a single one. In calls of their own, chunks of any size above one give bit by bit
the same sums. It takes no longer: llama.cpp would make as many passes over the weights.
"""

import numpy as np
from numpy.typing import NDArray

from caravan_shard.backends.base import TokenBatch


def split_calls(batch: TokenBatch) -> list[TokenBatch]:
    """Return the single tokens of ``batch`` together, and the tokens of each other sequence."""
    ids, counts = np.unique(batch.sequence_ids, return_counts=True)
    if len(ids) == 1 or counts.max() == 1:
        return [batch]
    single = np.isin(batch.sequence_ids, ids[counts == 1])
    masks = [single] if single.any() else []
    return [_select(batch, mask) for mask in (*masks, *(batch.sequence_ids == one for one in ids[counts > 1]))]


def output_rows(batch: TokenBatch, call: TokenBatch) -> NDArray[np.bool_]:
    """Mark those outputs of ``batch`` that ``call`` makes."""
    rows: NDArray[np.bool_] = np.isin(batch.sequence_ids[batch.outputs != 0], call.sequence_ids)
    return rows


def _select(batch: TokenBatch, mask: NDArray[np.bool_]) -> TokenBatch:
    return TokenBatch(
        tokens=batch.tokens[mask],
        positions=batch.positions[mask],
        sequence_ids=batch.sequence_ids[mask],
        outputs=batch.outputs[mask],
        adapter=batch.adapter,
    )

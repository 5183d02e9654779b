"""Parts the tokens of a step, so that how a sequence's sums are rounded does not depend on what else the step has.

Without flash attention, a matrix product for one token rounds otherwise than one for several. In the split layout,
llama.cpp computes as many tokens of each sequence together as the one with the fewest has: beside a decode, the first
token of a chunk would be computed as a single one. In calls of their own, chunks of any size above one give bit by bit
the same sums. It takes no longer: llama.cpp would make as many passes over the weights. A chunk that is one token
longer than a whole number of ubatches has its last two tokens in another call.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caravan_shard.backends.base import TokenBatch


@dataclass(frozen=True, slots=True)
class Call:
    """Tokens of a step that share a call of llama.cpp. ``rows`` marks those outputs of the step that it makes."""

    batch: TokenBatch
    rows: NDArray[np.bool_]


def split_calls(batch: TokenBatch, ubatch: int) -> list[Call]:
    """Return the single tokens of ``batch`` together, and the chunks of each other sequence.

    ``ubatch``: how many tokens llama.cpp computes together at most.
    """
    return [_select(batch, mask) for mask in _masks(batch.sequence_ids, ubatch)]


def _masks(sequence_ids: NDArray[np.int32], ubatch: int) -> Iterator[NDArray[np.bool_]]:
    ids, starts, counts = np.unique(sequence_ids, return_index=True, return_counts=True)
    single = np.isin(sequence_ids, ids[counts == 1])
    if single.any():
        yield single
    places = np.arange(len(sequence_ids))
    for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
        end = start + count
        middle = end - 2 if count > ubatch and count % ubatch == 1 else end
        yield (places >= start) & (places < middle)
        if middle < end:
            yield (places >= middle) & (places < end)


def _select(batch: TokenBatch, mask: NDArray[np.bool_]) -> Call:
    part = TokenBatch(
        tokens=batch.tokens[mask],
        positions=batch.positions[mask],
        sequence_ids=batch.sequence_ids[mask],
        outputs=batch.outputs[mask],
        adapter=batch.adapter,
    )
    return Call(part, mask[batch.outputs != 0])

"""Parts the tokens of a step, so that how a sequence's sums are rounded does not depend on what else the step has.

Without flash attention, a matrix product for one token rounds otherwise than one for several. In the split layout,
llama.cpp computes as many tokens of each sequence together as the one with the fewest has: beside a decode, the first
token of a chunk would be computed as a single one. In calls without shorter chunks, chunks of any size above one give
bit by bit the same sums. Each call reads the weights once. So chunks of one size share a call, such as those of `n`
choices, which start with the last two tokens of their prompt. A chunk that is one token longer than a whole number of
ubatches has its last two tokens in another call.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caravan_shard.backends.base import TokenBatch


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Tokens of a step that share a call of llama.cpp. ``rows`` marks those outputs of the step that it makes."""

    batch: TokenBatch
    rows: NDArray[np.bool_]


def has_single_tokens(batch: TokenBatch) -> bool:
    """Whether no sequence has two tokens, as in a step of decodes: it is one call, as `split_calls` finds slowly."""
    ids = batch.sequence_ids
    return len(ids) == 1 or bool((ids[1:] != ids[:-1]).all())


def split_calls(batch: TokenBatch, ubatch: int) -> list[DecodeCall]:
    """Return the single tokens of ``batch`` together, then the chunks of each size, shorter ones first.

    ``ubatch``: how many tokens llama.cpp computes together at most.
    """
    return [_select(batch, mask) for mask in _masks(batch.sequence_ids, ubatch)]


def _masks(sequence_ids: NDArray[np.int32], ubatch: int) -> Iterator[NDArray[np.bool_]]:
    ids, counts = np.unique(sequence_ids, return_counts=True)
    for count in np.unique(counts).tolist():
        equal = ids[counts == count]
        together = len(equal) if count == 1 else max(1, ubatch // count)
        for first in range(0, len(equal), together):
            mask = np.isin(sequence_ids, equal[first : first + together])
            if count > ubatch and count % ubatch == 1:
                last_two = mask & (np.cumsum(mask) > count - 2)
                yield mask & ~last_two
                yield last_two
            else:
                yield mask


def _select(batch: TokenBatch, mask: NDArray[np.bool_]) -> DecodeCall:
    part = TokenBatch(
        tokens=batch.tokens[mask],
        positions=batch.positions[mask],
        sequence_ids=batch.sequence_ids[mask],
        outputs=batch.outputs[mask],
        adapter=batch.adapter,
    )
    return DecodeCall(part, mask[batch.outputs != 0])

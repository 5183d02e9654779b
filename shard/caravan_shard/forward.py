"""What one pass consists of, and the arrays that describe it to the backend."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caravan_shard.backends.base import TokenBatch
from caravan_shard.sequences import Sequence as ShardSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's share: ``tokens`` go to positions from ``start``, which is what the cache held before.

    ``new`` sequences are forgotten if the pass fails; prompt tokens become known only when it succeeds.
    """

    sequence: ShardSequence
    start: int
    tokens: Sequence[int]
    samples: bool
    prompt: bool = False
    new: bool = False


def assemble(parts: Sequence[Part]) -> TokenBatch:
    """The arrays of a pass over ``parts``, which are in ascending order of sequence id.

    The order lets llama.cpp's split layout, which takes runs of consecutive ids, compute them together.
    """
    if all(len(part.tokens) == 1 for part in parts):
        return TokenBatch(
            np.array([part.tokens[0] for part in parts], np.int32),
            np.array([part.start for part in parts], np.int32),
            np.array([part.sequence.sequence_id for part in parts], np.int32),
            np.array([part.samples for part in parts], np.int8),
        )
    outputs = np.zeros(sum(len(part.tokens) for part in parts), np.int8)
    end = 0
    for part in parts:
        end += len(part.tokens)
        outputs[end - 1] = part.samples
    return TokenBatch(
        np.concatenate([np.array(part.tokens, np.int32) for part in parts]),
        np.concatenate([np.arange(part.start, part.start + len(part.tokens), dtype=np.int32) for part in parts]),
        np.concatenate([np.full(len(part.tokens), part.sequence.sequence_id, np.int32) for part in parts]),
        outputs,
    )

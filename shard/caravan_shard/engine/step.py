"""What one pass consists of, and the arrays that describe it to the backend."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caravan_shard.backends.base import TokenBatch
from caravan_shard.sequences.sequence import Sequence as ShardSequence


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

    @property
    def told_tokens(self) -> int:
        """How many of its tokens, the first ones, have their log probabilities told."""
        return self.sequence.parameters.told_tokens(self.start, len(self.tokens)) if self.prompt else 0

    @property
    def output_count(self) -> int:
        """Logits it needs: after every token that is told, and after its last if it samples."""
        told = self.told_tokens
        return told + (self.samples and told < len(self.tokens))


def assemble(parts: Sequence[Part]) -> TokenBatch:
    """The arrays of a pass over ``parts``, which are in ascending order of sequence id.

    All have the same adapter. The order lets llama.cpp's split layout, which takes runs of consecutive ids, compute
    them together.
    """
    adapter = parts[0].sequence.parameters.adapter
    if all(len(part.tokens) == 1 for part in parts):
        return TokenBatch(
            np.array([part.tokens[0] for part in parts], np.int32),
            np.array([part.start for part in parts], np.int32),
            np.array([part.sequence.sequence_id for part in parts], np.int32),
            np.array([part.samples or part.told_tokens > 0 for part in parts], np.int8),
            adapter,
        )
    outputs = np.zeros(sum(len(part.tokens) for part in parts), np.int8)
    end = 0
    for part in parts:
        start, end = end, end + len(part.tokens)
        outputs[start : start + part.told_tokens] = 1
        outputs[end - 1] |= part.samples
    return TokenBatch(
        np.concatenate([np.array(part.tokens, np.int32) for part in parts]),
        np.concatenate([np.arange(part.start, part.start + len(part.tokens), dtype=np.int32) for part in parts]),
        np.concatenate([np.full(len(part.tokens), part.sequence.sequence_id, np.int32) for part in parts]),
        outputs,
        adapter,
    )

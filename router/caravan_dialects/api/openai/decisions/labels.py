"""The tokens of labels, and their probabilities.

A label is one token in most vocabularies. Where it is several, its probability is the product of those of its tokens,
each after the ones before: so there is a row of logits for each token that some label goes on after.

    labels  AA AB B.        rows  after the prompt: A, B
    tokens  A A, A B, B .         after the prompt and A: A, B
                                  after the prompt and B: .
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self


class Row(NamedTuple):
    """The logits after ``path``, tokens after the prompt, of which those of the tokens ``following`` are needed."""

    path: tuple[int, ...]
    following: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LabelTokens:
    """The tokens of the labels of a question, none of which is the beginning of another."""

    labels: tuple[tuple[int, ...], ...]
    # The rows of logits that say how likely each label is; the first is that after the prompt.
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, labels: tuple[tuple[int, ...], ...]) -> Self:
        """Find the rows of ``labels``."""
        after: dict[tuple[int, ...], dict[int, None]] = {}
        for label in labels:
            for length, token in enumerate(label):
                after.setdefault(label[:length], {})[token] = None
        return cls(labels, tuple(Row(path, tuple(following)) for path, following in after.items()))

    def logprobs(self, found: Iterable[Mapping[int, float]]) -> list[float]:
        """Return the log probability of each label; ``found``: those of the tokens of each row."""
        rows = {row.path: logprobs for row, logprobs in zip(self.rows, found, strict=True)}
        return [math.fsum(rows[label[:length]][token] for length, token in enumerate(label)) for label in self.labels]


def normalized(logprobs: Sequence[float]) -> list[float]:
    """Return probabilities, whose sum is 1. ``logprobs`` must not all be -inf, nor one of them NaN."""
    highest = max(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]

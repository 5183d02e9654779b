"""The penalties of one sequence, which depend on its tokens so far."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats, Ids
from caravan_shard.sampling.change import Change
from caravan_shard.sampling.dry import DryPenalty


class Penalty(Protocol):
    """Lowers the logits of tokens because of the tokens of one sequence so far.

    A token's new logit depends on its own alone. ``sampler``: its name in `caravan_proto.messages.sampling.SAMPLERS`.
    """

    sampler: str

    def add(self, tokens: Sequence[int], *, output: bool) -> None:
        """Append tokens of the prompt or of the output."""
        ...

    def apply(self, logits: Floats) -> Change:
        """Change ``logits`` [vocabulary] in place, and return what has changed."""
        ...


def make_penalties(parameters: SamplingParams, piece: Callable[[int], bytes]) -> tuple[Penalty, ...]:
    """Make the penalties that ``parameters`` switch on, in order. ``piece`` gives the bytes of a token."""
    penalties: list[Penalty] = []
    if parameters.repeat_last_n != 0 and (
        parameters.repetition_penalty != 1.0
        or parameters.frequency_penalty != 0.0
        or parameters.presence_penalty != 0.0
    ):
        penalties.append(OccurrencePenalty(parameters))
    if parameters.dry_multiplier > 0.0 and parameters.dry_penalty_last_n != 0:
        penalties.append(DryPenalty(parameters, piece))
    return tuple(penalties)


class OccurrencePenalty:
    """Repetition, frequency and presence penalties. A Penalty.

    Keeps the distinct tokens and how often each occurs among the last ``repeat_last_n`` tokens. The arrays double when
    full, so that `apply` costs the number of distinct tokens and no Python loop.
    """

    sampler = "penalties"

    def __init__(self, parameters: SamplingParams) -> None:
        self._parameters = parameters
        self._index: dict[int, int] = {}
        self._ids: Ids = np.empty(256, np.int32)
        # Rows: occurrences in prompt and output, and in the output alone.
        self._counts: Floats = np.zeros((2, 256), np.float32)
        # The index of each token in the window and whether it is output; empty without a window.
        self._window: deque[tuple[int, bool]] = deque()

    def add(self, tokens: Sequence[int], *, output: bool) -> None:
        """Append tokens of the prompt or of the output."""
        most = self._parameters.repeat_last_n
        for token in tokens if most is None else tokens[-most:]:
            index = self._index.get(token)
            if index is None:
                index = self._append(token)
            self._count(index, 1, output=output)
            if most is None:
                continue
            self._window.append((index, output))
            if len(self._window) > most:
                index, was_output = self._window.popleft()
                self._count(index, -1, output=was_output)

    def apply(self, logits: Floats) -> Change:
        """Change ``logits`` [vocabulary] in place, and return what has changed."""
        parameters = self._parameters
        ids = self._ids[: len(self._index)]
        occurrences, outputs = self._counts[:, : len(self._index)]
        before: Floats = logits[ids]
        touched = before
        if parameters.repetition_penalty != 1.0:
            penalty = np.where(occurrences > 0, np.float32(parameters.repetition_penalty), np.float32(1.0))
            touched = np.where(touched > 0, touched / penalty, touched * penalty)
        touched = touched - outputs * np.float32(parameters.frequency_penalty)
        touched -= (outputs > 0) * np.float32(parameters.presence_penalty)
        logits[ids] = touched
        return Change(ids, before)

    def _append(self, token: int) -> int:
        index = len(self._index)
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._ids[index] = token
        self._index[token] = index
        return index

    def _count(self, index: int, by: int, *, output: bool) -> None:
        self._counts[0, index] += by
        if output:
            self._counts[1, index] += by

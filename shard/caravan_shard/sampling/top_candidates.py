"""Draws tokens from the highest logits of each row, where the others cannot matter.

A device that has found a row's highest logits need not hand over the others. The tokens are those that all logits give.
Where they might not be, the row is left: where a filter cuts among equal logits, their order depends on others.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.joint_draw import LEFT
from caravan_shard.sampling.sampler import Sampler

# Rows have as many candidates as one of these: a device needs another graph for each number.
CANDIDATE_CLASSES = (16, 64, 256)


class TopCandidates(NamedTuple):
    """The highest logits of a row, at least two, and their ids, in any order. ``whole``: the row has no others."""

    ids: NDArray[np.int32]
    logits: Floats
    whole: bool


class StepCandidates(NamedTuple):
    """The candidates of each row; None where all are in ``logits`` [rows, vocabulary], of which no others are valid."""

    rows: Sequence[TopCandidates | None]
    logits: Floats


def candidates_needed(parameters: SamplingParams) -> int:
    """Return how many of the highest logits decide a token; 0 if all may be needed. Penalties and biases need all."""
    if parameters.logprobs or parameters.order or parameters.processors or parameters.biases:
        return 0
    if parameters.greedy:
        return 2
    if parameters.top_n_sigma > 0.0 or parameters.typical_p < 1.0 or parameters.xtc_probability > 0.0:
        return 0
    # One more shows whether the last one is as likely as the next.
    return parameters.top_k + 1 if 0 < parameters.top_k < CANDIDATE_CLASSES[-1] else 0


def candidate_class(needed: int) -> int:
    """Return the smallest class that has ``needed`` candidates."""
    return next(size for size in CANDIDATE_CLASSES if size >= needed)


def draw_from(rows: Sequence[TopCandidates | None], choices: Sequence[Choice], sampler: Sampler) -> list[int]:
    """Return the token of each of ``rows``, or LEFT. ``choices`` change no logits where there are candidates."""
    tokens = [LEFT] * len(rows)
    sizes: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        if row is not None:
            sizes.setdefault(len(row.ids), []).append(place)
    for places in sizes.values():
        found = [row for place in places if (row := rows[place]) is not None]
        ids, logits = np.stack([row.ids for row in found]), np.stack([row.logits for row in found])
        # Ascending ids, as in a vocabulary: the draw goes through the candidates in this order.
        order = ids.argsort(axis=1)
        ids, logits = np.take_along_axis(ids, order, 1), np.take_along_axis(logits, order, 1)
        drawn = sampler.choose(logits, [choices[place] for place in places])
        rising = np.sort(logits, axis=1)
        for line, place in enumerate(places):
            if is_decided(rising[line], choices[place].parameters, whole=found[line].whole):
                tokens[place] = int(ids[line, drawn[line]])
    return tokens


def is_decided(rising: Floats, parameters: SamplingParams, *, whole: bool) -> bool:
    """Whether the ``rising`` logits of a row's candidates give the token that all logits give."""
    if not math.isfinite(rising[-1]):  # NaN is sorted behind all numbers
        return False
    if parameters.greedy:
        # Of equal ones the lowest id counts, which may not be among the candidates.
        return whole or bool(rising[0] < rising[-1])
    count = parameters.top_k
    if count < len(rising):
        if rising[-count - 1] == rising[-count]:
            return False
    elif not whole:
        return False
    kept = rising[-count:]
    return parameters.top_p == 1.0 or bool((kept[1:] > kept[:-1]).all())

"""Parts a step that has media into forward passes: llama.cpp takes tokens or embeddings, and not both at once.

Each sequence's rows are stretches of tokens and of embeddings, which must be computed in order. The passes are aligned
at the end of the step: the tokens after the last media of each sequence are computed together, with the sequences that
have no media; before them the media before these tokens, and so on. So a step of pictures and decodes takes two passes.

Where the cells of a picture see each other, each slice is a pass of its own, in one ubatch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from caravan_shard.backends.base import TokenBatch
from caravan_shard.media import MediaRows


@dataclass(frozen=True, slots=True)
class MediaPass:
    """One pass. ``rows``: which rows of the step it computes. ``batch``: these, all of media or all of tokens."""

    rows: NDArray[np.bool_]
    batch: TokenBatch
    causal: bool = True


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Rows [start, end) of one sequence; ``media`` is None if they are tokens."""

    start: int
    end: int
    media: MediaRows | None


def media_passes(batch: TokenBatch) -> list[MediaPass]:
    """Return the passes of ``batch`` in their order."""
    rounds: dict[int, list[_Stretch]] = {}
    for stretches in _sequences(batch):
        # Tokens have even numbers, counted from the end, and media have odd ones.
        number = -1
        for stretch in reversed(stretches):
            number += 1 + ((number + 1) % 2 != (stretch.media is not None))
            rounds.setdefault(number, []).append(stretch)
    return [one for number in sorted(rounds, reverse=True) for one in _passes(batch, rounds[number])]


def _sequences(batch: TokenBatch) -> Iterator[list[_Stretch]]:
    """Yield the stretches of each sequence."""
    ids = batch.sequence_ids
    borders = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    media = iter(batch.media)
    following = next(media, None)
    for start, end in pairwise(borders):
        stretches = []
        at = start
        while at < end:
            if following is not None and following.row == at:
                stretches.append(_Stretch(at, at + following.cells, following))
                following = next(media, None)
            else:
                stop = end if following is None else min(end, following.row)
                stretches.append(_Stretch(at, stop, None))
            at = stretches[-1].end
        yield stretches


def _passes(batch: TokenBatch, stretches: list[_Stretch]) -> Iterator[MediaPass]:
    """Yield one pass over stretches of one round, or one for each slice that is not causal."""
    groups: dict[int, list[_Stretch]] = {}
    for number, stretch in enumerate(stretches):
        groups.setdefault(0 if _is_causal(stretch) else -1 - number, []).append(stretch)
    for _, group in sorted(groups.items(), reverse=True):
        rows = np.zeros(len(batch.tokens), np.bool_)
        for stretch in group:
            rows[stretch.start : stretch.end] = True
        yield MediaPass(rows, _selected(batch, rows, group), _is_causal(group[0]))


def _is_causal(stretch: _Stretch) -> bool:
    return stretch.media is None or stretch.media.piece.causal


def _selected(batch: TokenBatch, rows: NDArray[np.bool_], stretches: list[_Stretch]) -> TokenBatch:
    places = np.cumsum(rows) - 1
    media = [one.media._replace(row=int(places[one.start])) for one in stretches if one.media is not None]
    return TokenBatch(
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        sequence_ids=batch.sequence_ids[rows],
        outputs=batch.outputs[rows],
        adapter=batch.adapter,
        media=media,
    )

"""Where a sequence has media among its cells."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from caravan_proto.messages.media import MediaFacts, MediaSpan
from caravan_shard.arrays import Ids
from caravan_shard.media.encoder import NO_TOKEN


@dataclass(frozen=True, slots=True)
class CellSpan:
    """The cells [start, end) of a sequence are of one slice of a medium.

    ``positions``: by how many positions the cell behind them is later than the first of them.
    """

    start: int
    end: int
    positions: int


def with_media(token_ids: Sequence[int], media: Sequence[MediaSpan]) -> Sequence[int]:
    """Return the tokens with `NO_TOKEN` under ``media``."""
    if not media:
        return token_ids
    tokens = list(token_ids)
    for span in media:
        tokens[span.offset : span.end] = [NO_TOKEN] * span.count
    return tokens


def is_within(spans: Sequence[CellSpan], cell: int) -> bool:
    """Whether a sequence that ends before ``cell`` has a part of a span only."""
    return any(span.start < cell < span.end for span in spans)


def held_spans(facts: MediaFacts | None, media: Iterable[MediaSpan], start: int) -> tuple[CellSpan, ...]:
    """Return the spans of what begins at the cell ``start`` that a sequence must not be cut within."""
    if facts is None or not facts.atomic:
        return ()
    return tuple(CellSpan(start + one.offset, start + one.end, one.positions) for one in media)


def spans_before(spans: Sequence[CellSpan], length: int) -> tuple[CellSpan, ...]:
    """Return the spans in the first ``length`` cells."""
    return tuple(span for span in spans if span.end <= length)


def position_of(spans: Sequence[CellSpan], cell: int) -> int:
    """Return the position of a cell that is not within a span, but may be the first of one."""
    return cell + sum(span.positions - (span.end - span.start) for span in spans if span.end <= cell)


def positions_of(spans: Sequence[CellSpan], start: int, end: int) -> Ids:
    """Return the positions of the cells [start, end). All of a span have that of its first one."""
    cells = np.arange(start, end, dtype=np.int32)
    found = cells.copy()
    for span in spans:
        inside = (cells >= span.start) & (cells < span.end)
        found[inside] -= cells[inside] - span.start
        found[cells >= span.end] += span.positions - (span.end - span.start)
    return found


def cell_count(spans: Sequence[CellSpan], position: int) -> int:
    """Return how many cells a sequence has whose last one has ``position``, where a span has that of its first cell."""
    for span in reversed(spans):
        if position >= position_of(spans, span.start):
            return max(span.end, position + 1 + span.end - position_of(spans, span.end))
    return position + 1

"""At which positions the model sees the cells of a sequence.

With positions of several dimensions (M-RoPE), the cells of a picture are places in a grid. A picture of 6 x 3 cells
begins at one position and takes 6: the text behind it goes on 6 positions later, not 18. All cells of a picture have
the first dimension of its first one. So positions are not places among the cells, and it is noted where each sequence
has pictures. A sequence is never cut within one.
"""

from collections.abc import Sequence

import numpy as np

from caravan_shard.arrays import Ids
from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.llama.memory.cell_state import CacheCells, StateError
from caravan_shard.media import CellSpan, cell_count, position_of, positions_of, spans_before


class Places:
    """The positions of sequences. Without grids, each cell is one later than the one before, whatever it is of."""

    def __init__(self, *, has_grids: bool = False) -> None:
        """``has_grids``: positions have several dimensions."""
        self._has_grids = has_grids
        # Where the pictures of a sequence are; empty without grids.
        self._spans: dict[int, tuple[CellSpan, ...]] = {}

    def note(self, batch: TokenBatch) -> None:
        """Note that the rows of ``batch`` are in memory now."""
        for rows in batch.media if self._has_grids else ():
            if rows.piece.planes is not None:
                sequence_id, start = int(batch.sequence_ids[rows.row]), int(batch.positions[rows.row])
                span = CellSpan(start, start + rows.cells, rows.piece.size.positions)
                self.set(sequence_id, (*self._of(sequence_id), span))

    def clear(self) -> None:
        """Forget every sequence."""
        self._spans.clear()

    def set(self, sequence_id: int, spans: Sequence[CellSpan]) -> None:
        """Note where a sequence has media."""
        if spans and self._has_grids:
            self._spans[sequence_id] = tuple(spans)
        else:
            self._spans.pop(sequence_id, None)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Note that a sequence has the media of the first ``length`` cells of another."""
        self.set(destination_id, spans_before(self._of(source_id), length))

    def trim(self, sequence_id: int, length: int) -> None:
        """Note that a sequence has its first ``length`` cells only."""
        self.set(sequence_id, spans_before(self._of(sequence_id), length))

    def positions(self, batch: TokenBatch) -> Ids:
        """Return the positions of rows that come behind all that their sequences hold."""
        if not self._spans:
            return batch.positions
        found = batch.positions.copy()
        for sequence_id in np.unique(batch.sequence_ids).tolist():
            rows = batch.sequence_ids == sequence_id
            first = int(batch.positions[rows][0])
            found[rows] += self.position(sequence_id, first) - first
        return found

    def position(self, sequence_id: int, cell: int) -> int:
        """Return the position of a cell that is not within a medium, but may be the first of one."""
        return position_of(self._of(sequence_id), cell)

    def all_positions(self, sequence_id: int, start: int, end: int) -> Ids:
        """Return the positions of the cells [start, end). All of a picture in a grid have that of its first one."""
        return positions_of(self._of(sequence_id), start, end)

    def length(self, sequence_id: int, last: int) -> int:
        """Return how many cells a sequence has whose last one has the position ``last``; -1 is that of none."""
        return cell_count(self._of(sequence_id), last)

    def cut(self, cache: CacheCells, sequence_id: int, start: int, end: int) -> CacheCells:
        """Return the cells [start, end) of a sequence; raises StateError if one is missing."""
        if not self._has_grids:
            return cache.cut(start, end)
        wanted = self.all_positions(sequence_id, start, end)
        order = np.argsort(cache.positions, kind="stable")
        order = order[np.searchsorted(cache.positions, wanted[0], sorter=order) :][: len(wanted)]
        if not np.array_equal(cache.positions[order], wanted):
            raise StateError(f"not all cells from {start} to {end} are there")
        return CacheCells(wanted, [rows[order] for rows in cache.rows], cache.extras[order])

    def _of(self, sequence_id: int) -> tuple[CellSpan, ...]:
        return self._spans.get(sequence_id, ())

"""At which positions the model sees the cells of a sequence."""

from collections.abc import Sequence

import numpy as np

from caravan_shard.arrays import Ids
from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.llama.cell_state import CacheCells
from caravan_shard.media.spans import CellSpan


class Places:
    """The positions of most models: each cell is one later than the one before."""

    def note(self, batch: TokenBatch) -> None:
        """Note that the rows of ``batch`` are in memory now."""

    def clear(self) -> None:
        """Forget every sequence."""

    def set(self, sequence_id: int, spans: Sequence[CellSpan]) -> None:
        """Note where a sequence has media."""

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Note that a sequence has the media of the first ``length`` cells of another."""

    def trim(self, sequence_id: int, length: int) -> None:
        """Note that a sequence has its first ``length`` cells only."""

    def positions(self, batch: TokenBatch) -> Ids:
        """Return the positions of rows that come behind all that their sequences hold."""
        return batch.positions

    def position(self, sequence_id: int, cell: int) -> int:
        """Return the position of a cell that is not within a medium, but may be the first of one."""
        return cell

    def all_positions(self, sequence_id: int, start: int, end: int) -> Ids:
        """Return the positions of the cells [start, end). All of a picture in a grid have that of its first one."""
        return np.arange(start, end, dtype=np.int32)

    def length(self, sequence_id: int, last: int) -> int:
        """Return how many cells a sequence has whose last one has the position ``last``; -1 is that of none."""
        return last + 1

    def cut(self, cache: CacheCells, sequence_id: int, start: int, end: int) -> CacheCells:
        """Return the cells [start, end) of a sequence; raises StateError if one is missing."""
        return cache.cut(start, end)

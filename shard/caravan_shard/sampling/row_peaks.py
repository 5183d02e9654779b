"""Finds the highest logits of many rows after one pass over each, as `Peaks` does for one row."""

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats
from caravan_shard.sampling.peaks import FEW, TABLE_ROWS


class RowPeaks:
    """The highest logit of each part of each row; see `Peaks`. ``highest`` [rows]: NaN if any logit of a row is NaN."""

    def __init__(self, logits: Floats, rows: NDArray[np.intp]) -> None:
        """``rows``: those of ``logits`` [rows, vocabulary] that matter; what is found has them in this order."""
        self._logits = logits
        self._rows = rows
        size = logits.shape[1]
        self._columns = columns = size // TABLE_ROWS
        self._end = end = TABLE_ROWS * columns
        self._table = logits[:, :end].reshape(len(logits), TABLE_ROWS, columns)
        self._peaks = np.empty((len(rows), columns + size - end), np.float32)
        for place, row in enumerate(rows.tolist()):
            self._table[row].max(axis=0, out=self._peaks[place, :columns])
        if end < size:
            self._peaks[:, columns:] = logits[rows, end:]
        self.highest: Floats = self._peaks.max(axis=1)

    @staticmethod
    def most_counted(vocabulary_size: int) -> int:
        """Return the most logits that `levels` can count."""
        columns, rest = divmod(vocabulary_size, TABLE_ROWS)
        return int(FEW * (columns + rest))

    def levels(self, count: int, among: NDArray[np.intp] | None = None) -> Floats:
        """Return for each row, or for those at the places ``among``, a level that the ``count`` highest logits reach.

        Only few others reach it.
        """
        peaks = self._peaks if among is None else self._peaks[among]
        if count == 0:
            return np.full(len(peaks), -np.inf, np.float32)
        levels: Floats = np.partition(peaks, -count, axis=1)[:, -count]
        return levels

    def reaching(self, levels: Floats, most: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
        """Return the logits >= the level of their row: place of the row, token id, logit, ascending by place and id.

        A row that has more than ``most`` of them, or no number as its highest logit, has none.
        """
        width = self._peaks.shape[1]
        reached = self._peaks >= levels[:, None]
        reached &= np.isfinite(self.highest)[:, None]
        many = reached.sum(axis=1) > most
        if many.any():
            reached[many] = False
        places, parts = np.divmod(reached.ravel().nonzero()[0], width)
        in_table = parts < self._columns
        rest = ~in_table
        keys = self._keys(places[rest], parts[rest] - self._columns + self._end) if rest.any() else None
        if keys is not None:
            places, parts = places[in_table], parts[in_table]
        # [part, row of the table]
        logits = self._table[self._rows[places], :, parts]
        part, table_row = np.divmod((logits >= levels[places][:, None]).ravel().nonzero()[0], TABLE_ROWS)
        found = self._keys(places[part], table_row * self._columns + parts[part])
        found = np.sort(found if keys is None else np.concatenate([found, keys]))
        size = self._logits.shape[1]
        places, ids = np.divmod(found, size)
        counts = np.bincount(places, minlength=len(self._rows))
        if counts.max() > most:
            few = (counts <= most)[places]
            places, ids = places[few], ids[few]
        return places, ids, self._logits.reshape(-1).take(self._rows[places] * size + ids)

    def _keys(self, places: NDArray[np.intp], ids: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return numbers that have the order of rows and of ids within them."""
        return places * self._logits.shape[1] + ids

"""A shard finds out whether tokens have the same logits alone and together, and empties its memory again."""

from unittest.mock import Mock

import numpy as np
import pytest

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.invariance import BatchInvariance


class Logits:
    """Makes logits that differ for several tokens behind ``unequal_from`` cells or more."""

    def __init__(self, unequal_from: int) -> None:
        self._unequal_from = unequal_from
        self.batches: list[tuple[int, int]] = []
        self.memory = Mock()

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        self.batches.append((int(batch.positions[0]), len(batch.tokens)))
        return DecodeOutcome.OK

    def read(self, rows: int) -> Floats:
        start, count = self.batches[-1]
        differs = count > 1 and start >= self._unequal_from
        return np.full(
            (rows, 3), np.nextafter(np.float32(start + count), np.float32(0)) if differs else start + count, np.float32
        )


@pytest.mark.parametrize(
    ("unequal_from", "longest", "found"),
    [
        (999, 2048, {300: True, 100: True}),
        (256, 2048, {300: False}),
        (100, 256, {100: False}),
        (999, 303, {100: True}),
        (0, 64, {}),
    ],
)
def test_numbers_of_cells_are_measured_until_logits_differ(
    unequal_from: int, longest: int, found: dict[int, bool]
) -> None:
    logits = Logits(unequal_from)
    assert BatchInvariance(logits.decode, logits.read, logits.memory).measure(longest) == found
    assert logits.memory.clear.call_count == len(found)
    for cells in found:
        logits.memory.fill_cells.assert_any_call(0, cells)
        assert (cells, 4) in logits.batches
        assert [(cells + place, 1) for place in range(4)] == [
            batch for batch in logits.batches if cells <= batch[0] < cells + 4 and batch[1] == 1
        ]


def test_what_cannot_be_computed_is_left_out() -> None:
    logits = Logits(999)
    logits.memory.fill_cells.side_effect = lambda _sequence_id, cells: cells < 256
    assert BatchInvariance(logits.decode, logits.read, logits.memory).measure(2048) == {100: True}
    failing = Mock(return_value=DecodeOutcome.FAILED)
    assert BatchInvariance(failing, logits.read, logits.memory).measure(2048) == {}

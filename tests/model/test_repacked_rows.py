"""Weights in Q4_0 multiply rows in groups of four. What fills a group changes no bit of its rows."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_testing.shard_models import WORDS_MODEL, ModelDriver, fetched, requantise

pytestmark = pytest.mark.model

TOKENS = np.arange(1000, 1013, dtype=np.int32)


def logits(driver: ModelDriver, cuts: list[int]) -> Floats:
    """Return the logits after each of the first tokens, computed in chunks that end at ``cuts``."""
    backend = driver.backend
    backend._memory.clear()
    found = []
    for start, end in pairwise([0, *cuts]):
        batch = TokenBatch(
            tokens=TOKENS[start:end],
            positions=np.arange(start, end, dtype=np.int32),
            sequence_ids=np.zeros(end - start, np.int32),
            outputs=np.ones(end - start, np.int8),
        )
        assert backend.decode(batch) is DecodeOutcome.OK
        found.append(backend.logits(end - start).copy())
    return np.concatenate(found)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_two_or_three_rows_are_computed_as_if_they_were_four(threads: int, tmp_path: Path) -> None:
    model = requantise(fetched(WORDS_MODEL), tmp_path / "model.gguf", "Q4_0")
    driver = ModelDriver(model, ctx_size=1024, kv_layout="split", threads=threads)
    groups = logits(driver, [4, 8, 12])
    for count in (2, 3, 6, 7, 10, 11):
        assert np.array_equal(logits(driver, [count]), groups[:count]), count
        assert np.array_equal(logits(driver, sorted({count % 4, count})), groups[:count]), count
    # A single row is multiplied by another kernel.
    for count in (1, 5, 9):
        np.testing.assert_allclose(logits(driver, [count]), groups[:count], atol=0.01)
    driver.engine.close()

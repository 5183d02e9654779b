"""Weights in Q4_0 multiply rows in groups of four. What fills a group changes nothing of its rows."""

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
def test_any_number_of_rows_gives_the_logits_of_groups_of_four(threads: int, tmp_path: Path) -> None:
    model = requantise(fetched(WORDS_MODEL), tmp_path / "model.gguf", "Q4_0")
    driver = ModelDriver(model, ctx_size=1024, kv_layout="split", threads=threads)
    groups = logits(driver, [4, 8, 12])
    # Which rows are computed in a group, and by which kernel the others, depends on the processor.
    closeness = 1e-3 * float(np.abs(groups).max())
    for count in range(1, 12):
        np.testing.assert_allclose(logits(driver, [count]), groups[:count], rtol=0, atol=closeness)
        if count % 4:
            cuts = sorted({count % 4, count})
            np.testing.assert_allclose(logits(driver, cuts), groups[:count], rtol=0, atol=closeness)
    driver.engine.close()

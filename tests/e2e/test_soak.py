"""`make soak` on a model of random weights, for as long as a test may take."""

import asyncio

import pytest
from soak.load import RandomLoad
from soak.soak import FLAGS, soak
from soak.watch import Sample

from caravan_testing.serve_process import serve
from caravan_testing.shard_models import WORDS_MODEL, fetched

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1800)]

SECONDS = 6.0
# Fewer KV cells than in `make soak` are scarce sooner. The threads of one step wait for each other, so that on a busy
# machine one thread is faster than two.
FEWER = ("-c", "1024", "-t", "1")


def test_random_load_with_too_few_cells_gives_no_error_and_leaves_nothing_behind() -> None:
    with serve(*FLAGS, *FEWER, models=(fetched(WORDS_MODEL),)) as served:
        load = RandomLoad(served.url, clients=5, burst_every_s=SECONDS, burst_tokens=64, seed=7)

        def enough(sample: Sample) -> bool:
            """Whether a slow machine has come as far as the assertions below want it."""
            return load.tally.answered > 20 and load.tally.left > 0 and sample.swaps + sample.recomputes > 0

        complaints, samples = asyncio.run(soak(served, load, seconds=SECONDS, report_s=SECONDS, enough=enough))
    assert not complaints
    assert load.tally.answered > 20
    assert load.tally.left > 0
    assert samples[-1].swaps + samples[-1].recomputes > 0

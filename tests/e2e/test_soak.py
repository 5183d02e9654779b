"""`make soak`, for as long as a test may take."""

import asyncio

import pytest
from soak.load import RandomLoad
from soak.soak import FLAGS, soak

from caravan_testing.serve_process import serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

SECONDS = 12.0


def test_random_load_with_too_few_cells() -> None:
    with serve(*FLAGS) as served:
        load = RandomLoad(served.url, clients=5, burst_every_s=SECONDS, seed=7)
        complaints, samples = asyncio.run(soak(served, load, seconds=SECONDS, report_s=SECONDS))
    assert not complaints
    assert load.tally.answered > 20
    assert load.tally.left > 0
    assert samples[-1].swaps + samples[-1].recomputes > 0

"""`make chaos`, for as long as a test may take."""

import asyncio

import pytest
from chaos.chaos import Plan, run
from chaos.faults import Kind

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1800)]

# Shorter answers than in `make chaos`, which also checks how soon losses are noticed: a busy machine delays that.
PLAN = Plan(seconds=40, seed=7, clients=6, asks=12, longest=60, spare_s=60.0)


def test_clients_notice_no_more_than_a_pause_when_shards_and_links_break() -> None:
    outcome = asyncio.run(run(PLAN))
    assert not outcome.problems
    unplugged = any(fault.spot is not None and fault.spot.network is not None for fault in outcome.faults)
    assert {fault.kind for fault in outcome.faults} == set(Kind) - (set() if unplugged else {Kind.UNPLUG})

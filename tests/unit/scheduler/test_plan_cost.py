"""What a step costs does not grow with the shards or with the queue: counted in function calls, not in seconds."""

import sys
from collections.abc import Iterable
from types import FrameType

import pytest
from bench.plan_cost import Case, FullFleet

from caravan_scheduler.actions import Action
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Event
from caravan_scheduler.scheduler import Scheduler


class CountingScheduler(Scheduler):
    """Counts the calls of Python functions that `handle` makes."""

    calls = 0

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        before = sys.getprofile()
        sys.setprofile(self._count)
        try:
            return super().handle(events, now)
        finally:
            sys.setprofile(before)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"


def calls_per_step(shards: int, queued: int, *, cells: int = 8000, mixed_lengths: bool = False) -> float:
    """Return the calls per step of 8 sequences once all shards are full."""
    scheduler = CountingScheduler(SchedulerConfig())
    case = Case(shards=shards, queued=queued, sequences=8, cells=cells, mixed_lengths=mixed_lengths)
    fleet = FullFleet(case, 1, scheduler)
    fleet.begin()
    fleet.run(30 * shards)
    fleet.forget_figures()
    scheduler.calls = 0
    fleet.run(50 * shards)
    return scheduler.calls / fleet.steps


@pytest.mark.parametrize(("shards", "queued"), [(2, 200), (20, 10), (20, 200)])
def test_a_step_costs_the_same_with_ten_times_the_shards_or_requests(shards: int, queued: int) -> None:
    assert calls_per_step(shards, queued) < 1.5 * calls_per_step(2, 20)


@pytest.mark.parametrize(("shards", "queued"), [(2, 200), (20, 200)])
def test_nor_does_it_grow_with_them_where_cells_are_short(shards: int, queued: int) -> None:
    """Then many shards have ids for a request and no cells, and each request that is looked at costs more."""
    few = calls_per_step(2, 20, cells=2000, mixed_lengths=True)
    assert calls_per_step(shards, queued, cells=2000, mixed_lengths=True) < 2 * few

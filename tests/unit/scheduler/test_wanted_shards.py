"""The number of shards that the load needs: what comes, what that takes, and what the scheduler makes of both."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import BULK_PRIORITY
from caravan_scheduler.load import Arrivals, DecodeCurve, DecodeTimes, Load
from caravan_scheduler.planning.wanted_shards import Mix, Need, Room, WantedShards
from caravan_testing.ledgers import LIMITS, limits_of
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import Simulation, simulation


def after(rate: Callable[[float], float], until_s: float, *, together: int = 1, begin_s: float = 0.0) -> Arrivals:
    """Return arrivals of which so many come ``together`` at times of a Poisson process."""
    source, arrivals, now_s = random.Random(1), Arrivals(), begin_s
    while True:
        now_s += source.expovariate(rate(now_s) / together)
        if now_s > until_s:
            return arrivals
        for _ in range(together):
            arrivals.note(now_s)


@pytest.mark.parametrize("per_second", [2.0, 50.0])
def test_a_steady_rate_is_expected_to_go_on(per_second: float) -> None:
    arrivals = after(lambda _: per_second, 600.0)
    assert arrivals.expected(600.0, 120.0) == pytest.approx(per_second, rel=0.3)


def test_a_rate_that_grows_is_expected_to_grow_on_and_one_that_falls_is_not_expected_to_fall() -> None:
    assert after(lambda now: 10 + now / 10, 300.0).expected(300.0, 100.0) == pytest.approx(50, rel=0.15)
    falling = after(lambda now: 60 - now / 10, 300.0).expected(300.0, 100.0)
    assert falling == pytest.approx(30, rel=0.15)


def test_bursts_are_no_growth() -> None:
    expected = [after(lambda _: 40.0, until_s, together=40).expected(until_s, 100.0) for until_s in range(300, 900, 50)]
    assert max(expected) < 100
    assert 20 < sum(expected) / len(expected) < 60


def test_a_single_request_may_be_chance_and_a_long_pause_ends_what_was_known() -> None:
    arrivals = Arrivals()
    arrivals.note(100.0)
    for now in (100.0, 104.0, 106.0, 130.0):
        assert arrivals.expected(now, 100.0) == pytest.approx(0, abs=0.02)
    busy = after(lambda _: 50.0, 300.0)
    assert busy.expected(300.0, 0.0) > 40
    assert busy.expected(10_000.0, 0.0) == 0
    busy.note(10_001.0)
    assert busy.expected(10_010.0, 0.0) < 1


def test_a_curve_goes_on_as_its_last_line_but_rises_no_more_than_in_proportion() -> None:
    curve = DecodeCurve([(2.0, 0.022), (10.0, 0.030)])
    assert [curve.seconds(size) for size in (1, 2, 6, 10, 20)] == pytest.approx([0.022, 0.022, 0.026, 0.030, 0.040])
    assert DecodeCurve([(1.0, 0.01), (2.0, 0.03)]).seconds(4) == pytest.approx(0.06)
    assert DecodeCurve([(4.0, 0.04)]).seconds(12) == pytest.approx(0.08)


def test_decodes_are_remembered_by_their_number_and_drafts_make_them_faster() -> None:
    times = DecodeTimes()
    assert times.curve is None
    for _ in range(20):
        times.note(1, 1, 0.02)
        times.note(8, 16, 0.06)
    for _ in range(2000):
        times.note(1, 1, 0.02)
    assert times.curve is not None
    assert times.curve.seconds(8) == pytest.approx(0.03)


def test_a_chunk_takes_what_a_step_takes_longer_by_it() -> None:
    load = Load()
    load.decodes.note(1, 1, 0.02)
    load.decodes.note(4, 4, 0.02)
    load.note_chunks(100, 0.05, riders=3)
    assert load.prompt_token_s == pytest.approx(0.0003)


# A shard of docs/sizing.md, and what unrelated prompts take of it.
ROOM = Room(sequences=32, cells=40_000)
MIX = Mix(
    rate=80.0,
    prompt_s=0.1,
    prompt_s_squared=0.0112,
    output_tokens=100,
    cells=550,
    decodes=DecodeCurve([(1.0, 0.02), (33.0, 0.025)]),
)
CONFIG = SchedulerConfig()


def test_the_need_is_that_of_littles_law() -> None:
    need = Need(ROOM, MIX, CONFIG)
    # A request takes 100 steps of 22.3 ms and 16 chunks of 0.1 s.
    assert need.request_s(16.0) == pytest.approx(3.834, rel=0.01)
    assert need.shards(16.0) == pytest.approx(80 * 3.834 / 16, rel=0.01)
    # Sixteen shards serve this load in the simulation of docs/sizing.md.
    assert 13 < need.least_shards() < 16


@pytest.mark.parametrize(
    ("room", "mix", "config"),
    [
        (replace(ROOM, cells=6_000), MIX, CONFIG),
        (replace(ROOM, sequences=8), MIX, CONFIG),
        (ROOM, MIX, replace(CONFIG, target_itl_s=0.03)),
        (ROOM, replace(MIX, cells=2_000), replace(CONFIG, target_cell_share=0.4)),
    ],
)
def test_less_room_and_tighter_targets_need_more_shards(room: Room, mix: Mix, config: SchedulerConfig) -> None:
    assert Need(room, mix, config).least_shards() > 1.1 * Need(ROOM, MIX, CONFIG).least_shards()


def test_long_prompts_that_wait_for_others_need_more_shards() -> None:
    mix = replace(MIX, rate=4.0, prompt_s=0.5, prompt_s_squared=0.5, output_tokens=5)
    shards = Need(ROOM, mix, CONFIG).least_shards()
    assert 2 < shards < 4
    assert Need(ROOM, replace(mix, prompt_s_squared=2.0), CONFIG).least_shards() > 1.1 * shards
    assert Need(ROOM, mix, replace(CONFIG, target_ttft_s=0.7)).least_shards() > 1.1 * shards


def test_targets_that_no_shard_meets_ask_for_no_endless_fleet() -> None:
    config = replace(CONFIG, target_ttft_s=0.001, target_itl_s=0.001)
    alone = MIX.rate * Need(ROOM, MIX, config).request_s(1.0)
    assert math.isfinite(alone)
    assert Need(ROOM, MIX, config).least_shards() <= 5 * alone


def wanted(sim: Simulation) -> float:
    """Return the number now."""
    sim.tick(1.0)
    return WantedShards().number(sim.scheduler.state, sim.now)


def test_without_a_shard_a_request_wants_one_and_nothing_wants_none() -> None:
    sim = Simulation(CONFIG)
    assert wanted(sim) == 0
    request_id = sim.submit(prompt_of(10), 5)
    assert wanted(sim) == 1
    sim.cancel(request_id)
    assert wanted(sim) == 0


def test_a_number_is_kept_for_a_second_unless_it_is_that_of_a_quiet_model() -> None:
    sim, numbers = simulation(limits=limits_of(max_sequences=2)), WantedShards()
    assert numbers.number(sim.scheduler.state, sim.now) == 0
    sim.submit(prompt_of(10), 5)
    first = numbers.number(sim.scheduler.state, sim.now)
    assert first > 0
    for number in range(9):
        sim.submit(prompt_of(10, number), 5)
    assert numbers.number(sim.scheduler.state, sim.now + 0.9) == first
    assert numbers.number(sim.scheduler.state, sim.now + 1.0) > first


def test_what_runs_wants_a_shard_until_it_has_ended_and_also_while_its_shard_is_lost() -> None:
    sim, numbers = simulation(), WantedShards()

    def wanted(sim: Simulation) -> float:
        sim.tick(1.0)
        return numbers.number(sim.scheduler.state, sim.now)

    sim.submit(prompt_of(10), 50)
    for _ in range(8):
        sim.advance("a")
        assert 0 < wanted(sim) <= 1
    sim.lose("a")
    assert 0 < wanted(sim) <= 1
    sim.join("b", LIMITS)
    sim.drain("b")
    assert 0 < wanted(sim) <= 1
    sim.join("c", LIMITS)
    sim.run()
    assert wanted(sim) == 0


def test_more_than_shards_can_run_wants_more_shards() -> None:
    sim = simulation(limits=limits_of(max_sequences=2))
    for number in range(20):
        sim.submit(prompt_of(30, number), 20)
    sim.advance("a")
    assert wanted(sim) > 8


def test_bulk_work_wants_a_shard_and_no_more() -> None:
    sim = simulation(limits=limits_of(max_sequences=2))
    for number in range(20):
        sim.submit(prompt_of(30, number), 20, priority=BULK_PRIORITY)
    sim.advance("a")
    assert 0 < wanted(sim) <= 1


def test_cells_in_use_and_those_to_come_want_shards() -> None:
    sim = simulation(limits=limits_of(cells=1000, cells_per_sequence=1000, max_sequences=8), target_cell_share=0.1)
    sim.submit(prompt_of(100), 300)
    sim.advance("a")
    # 399 cells in the end, of 100 that should be in use on a shard.
    assert wanted(sim) > 3


def test_a_model_without_cells_wants_none() -> None:
    """Its texts are embedded beside the scheduler, which has no sequences of it."""
    sim = simulation(limits=limits_of(cells=0, cells_per_sequence=0, max_sequences=0))
    assert WantedShards().number(sim.scheduler.state, 1.0) == 0.0

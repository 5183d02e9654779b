"""Lifetimes that clients ask for: what is kept of their prompts outlasts what others bring, while its key pays."""

from dataclasses import replace

import pytest

from caravan_proto.messages.commands import Save
from caravan_proto.messages.limits import Saving
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.lifetimes import Kept, Lifetime, longer, within_shares
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.saved_runs import Tier
from caravan_testing.ledgers import limits_of
from caravan_testing.play import Play
from caravan_testing.requests import prompt_of, request
from caravan_testing.simulation import Simulation, simulation

ALICE, BOB = Tenant(name="alice"), Tenant(name="bob", weight=3.0)


def test_a_key_has_its_share_of_what_is_kept() -> None:
    asked = [("a", Kept(ALICE, 30)), ("b", Kept(BOB, 60)), ("c", Kept(ALICE, 10)), ("d", Kept(ALICE, 20))]
    assert within_shares(asked, 100) == ["b", "c"]
    assert within_shares(asked, 120) == ["a", "b"]
    assert within_shares(asked[:1], 30) == ["a"], "one that asks alone may have all"
    assert within_shares([], 10) == []


def test_the_longest_of_two_lifetimes_counts() -> None:
    short, long = Lifetime(ALICE, 5.0), Lifetime(BOB, 9.0)
    assert longer(short, long) is longer(long, short) is longer(None, long) is long
    assert longer(None, None) is None


# In host memory


def memory(cells: int = 400, disk: int = 0) -> Simulation:
    """A cell takes a byte of memory here."""
    limits = limits_of(cells=400, saving=Saving.ANY, memory_bytes=cells)
    return simulation(limits=replace(limits, disk_bytes=disk))


def complete(sim: Simulation, prompt: tuple[int, ...], keep_s: float = 0.0, tenant: Tenant = ALICE) -> None:
    """Let a prompt be computed, answered and saved."""
    sim.submit(prompt, 2, ignore_eos=True, keep_s=keep_s, tenant=tenant)
    sim.settle()
    sim.tick(0.5)
    sim.run()


def others(sim: Simulation, first: int, count: int = 12) -> None:
    for number in range(first, first + count):
        complete(sim, prompt_of(64, number))


def saved(sim: Simulation, prompt: tuple[int, ...]) -> int:
    """Return of how many tokens of a prompt the cells are saved."""
    return sim.scheduler.shards["a"].runs.covered(Sequence(request(0, prompt)).keys, len(prompt))


def test_what_is_saved_stays_until_the_lifetime_after_its_last_use_has_ended() -> None:
    sim = memory()
    complete(sim, prompt_of(64), keep_s=300.0)
    others(sim, 2)
    assert saved(sim, prompt_of(64)) == 64
    sim.tick(200.0)
    complete(sim, (*prompt_of(64), 91, 92))
    sim.tick(200.0)
    others(sim, 20)
    assert saved(sim, prompt_of(64)) == 64, "it was used 200 seconds ago"
    sim.tick(120.0)
    others(sim, 40)
    assert saved(sim, prompt_of(64)) == 0


def test_without_a_lifetime_it_makes_way() -> None:
    sim = memory()
    complete(sim, prompt_of(64))
    others(sim, 2)
    assert saved(sim, prompt_of(64)) == 0


def test_a_key_keeps_no_more_than_its_share() -> None:
    sim = memory()
    for number in range(1, 6):
        complete(sim, prompt_of(64, number), keep_s=300.0)
    complete(sim, prompt_of(64, 6), keep_s=300.0, tenant=Tenant(name="bob"))
    others(sim, 10)
    assert [saved(sim, prompt_of(64, number)) for number in range(1, 7)] == [0, 0, 0, 0, 64, 64]


def test_files_are_the_last_place_where_there_are_any() -> None:
    sim = memory(disk=400)
    complete(sim, prompt_of(64), keep_s=300.0)
    others(sim, 2, 30)
    assert saved(sim, prompt_of(64)) == 64
    runs = sim.scheduler.shards["a"].runs
    assert runs.used_bytes[Tier.DISK] <= 400


def test_it_is_saved_although_others_wait() -> None:
    sim = simulation(limits=limits_of(cells=70, saving=Saving.ANY, memory_bytes=400, max_sequences=2))
    sim.submit(prompt_of(48), 2, ignore_eos=True, keep_s=300.0)
    sim.submit(prompt_of(64, 2), 2, ignore_eos=True)
    sim.settle()
    assert sim.sent(Save)
    assert saved(sim, prompt_of(48)) == 48


# In cells


@pytest.fixture
def play() -> Play:
    """Return a play in which 1,500 of 4,000 cells are to be kept for five minutes, and 900 are in use for long."""
    play = Play()
    play.ask(1, prompt_of(1490), keep_s=300.0, tenant=ALICE)
    play.until_idle()
    play.pass_s(60.0)
    play.ask(2, prompt_of(900, seed=2), output=600, tenant=ALICE)
    play.pass_s(12.0)
    return play


def cells(play: Play) -> int:
    """Return how many cells of the first request there are."""
    return max((one.computed for one in play.shard.stays.parked.values() if one.request_id == 1), default=0)


def test_cells_are_kept_from_what_could_start_beside_them_later(play: Play) -> None:
    play.ask(3, prompt_of(2000, seed=3), tenant=ALICE)
    play.pass_s(1.0)
    assert 3 not in play.started_s
    play.until_idle()
    assert 3 in play.started_s
    assert cells(play) == 1499


def test_what_could_never_start_beside_them_takes_them(play: Play) -> None:
    play.ask(3, prompt_of(2900, seed=3), tenant=ALICE)
    play.until_idle()
    assert cells(play) < 1499


def test_a_higher_priority_takes_them(play: Play) -> None:
    asked_s = play.fleet.now_s
    play.ask(3, prompt_of(2000, seed=3), priority=1)
    play.until_idle()
    assert play.started_s[3] - asked_s < 0.5
    assert cells(play) < 1499


def test_they_are_kept_no_longer_than_that(play: Play) -> None:
    play.pass_s(300.0)
    play.ask(4, prompt_of(900, seed=4), output=600, tenant=ALICE)
    play.pass_s(12.0)
    asked_s = play.fleet.now_s
    play.ask(3, prompt_of(2000, seed=3), tenant=ALICE)
    play.until_idle()
    assert play.started_s[3] - asked_s < 0.5


def test_what_runs_takes_them_last_and_waits_for_nobody(play: Play) -> None:
    play.until_idle()
    play.ask(5, prompt_of(900, seed=5), tenant=ALICE)
    play.until_idle()
    play.ask(6, prompt_of(1500, seed=6), output=900, tenant=ALICE)
    play.until_idle()
    assert cells(play) == 1499, "others made way before"
    play.ask(7, prompt_of(1000, seed=7), output=2500, tenant=ALICE)
    play.until_idle()
    assert cells(play) < 1499


def test_holding_is_charged_to_its_key_though_that_is_idle() -> None:
    play = Play()
    play.ask(1, prompt_of(1490), keep_s=300.0, tenant=ALICE)
    play.until_idle()
    play.ask(2, prompt_of(900, seed=2), output=600, tenant=BOB)
    play.pass_s(12.0)
    play.ask(3, prompt_of(2000, seed=3), tenant=BOB)
    shares = play.scheduler.state.shares.tenants
    before = shares.counter(ALICE)
    play.pass_s(2.0)
    assert 3 not in play.started_s
    assert shares.counter(ALICE) - before == pytest.approx(2.0 * 2.0 / play.shard.costs.mean_step_s, rel=0.2)

"""An operator flushes what shards keep of ended sequences."""

from caravan_proto.messages.commands import FilterBatch, Prefill
from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.actions import Flushed
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.events import FlushRequested
from caravan_scheduler.shard.remembered import prefixes_of
from caravan_testing.ledgers import limits_of
from caravan_testing.simulation import simulation

HELLO = tuple(range(1, 21))


def test_an_idle_shard_gets_a_command_at_once() -> None:
    sim = simulation("a")
    sim.complete(HELLO, 5, ignore_eos=True, tenant=Tenant(name="alice"), adapter="x")
    sim.now = 12.0
    sim.complete(HELLO, 3, ignore_eos=True)
    assert len(sim.shards["a"].held) == 2
    sim.actions.clear()
    [evicted] = sim.flush("a")
    first, second = evicted.prefixes
    assert (first.tokens, first.cells, first.tenant, first.adapter) == (24, 24, "alice", "x")
    assert (second.tokens, second.cells, second.tenant, second.adapter) == (22, 22, "", "")
    assert first.last_used_s < 12.0 < second.last_used_s
    assert evicted.cells == 46
    [sent] = sim.sent(FilterBatch)
    assert sorted(sent.header.release) == [0, 1]
    sim.run()
    assert not sim.shards["a"].held
    sim.check_at_rest()


def test_running_sequences_are_not_touched() -> None:
    sim = simulation("a")
    ended = sim.complete(HELLO, 5, ignore_eos=True)
    running = sim.submit((*HELLO[:10], 50, 51), 60, ignore_eos=True)
    sim.advance("a", 5)
    before = sim.scheduler.shards["a"].cells.live
    [evicted] = sim.flush("a")
    # Ten tokens of the ended sequence are the beginning of the running one, and stay.
    assert [prefix.tokens for prefix in evicted.prefixes] == [24]
    assert evicted.cells == 14
    assert sim.scheduler.shards["a"].cells.live == before
    sim.run()
    assert {ended, running} <= sim.finished
    sim.check_at_rest()


def test_prefixes_that_share_cells_count_them_once() -> None:
    sim = simulation("a")
    sim.submit((*HELLO, 50, 51), 2, ignore_eos=True)
    sim.complete((*HELLO, 60, 61), 2, ignore_eos=True)
    [evicted] = sim.flush("a")
    assert [(prefix.tokens, prefix.cells) for prefix in evicted.prefixes] == [(23, 3), (23, 3)]
    assert evicted.cells == len(HELLO) + 6


def test_each_sequence_of_a_split_cache_has_cells_of_its_own() -> None:
    sim = simulation("a", limits=limits_of(cells_per_sequence=100, layout=KvLayout.SPLIT))
    sim.submit((*HELLO, 50, 51), 2, ignore_eos=True)
    sim.complete((*HELLO, 60, 61), 2, ignore_eos=True)
    [evicted] = sim.flush("a")
    assert [(prefix.tokens, prefix.cells) for prefix in evicted.prefixes] == [(23, 23), (23, 23)]
    assert evicted.cells == 46


def test_a_source_that_another_starts_from_was_used_then() -> None:
    sim = simulation("a")
    sim.complete(HELLO, 5, ignore_eos=True)
    sim.now = 30.0
    sim.submit((*HELLO[:10], 50), 30, ignore_eos=True)
    [prefix] = prefixes_of(sim.scheduler.shards["a"]).prefixes
    assert prefix.last_used_s == 30.0


def test_only_the_named_shards_are_flushed() -> None:
    sim = simulation("a", "b")
    for number in range(4):
        sim.submit(tuple(range(number * 20 + 1, number * 20 + 11)), 5, ignore_eos=True)
    sim.run()
    assert all(sim.scheduler.shards[name].stays.parked for name in "ab")
    assert [one.shard for one in sim.flush("b", "gone")] == ["b"]
    assert sim.scheduler.shards["a"].stays.parked
    sim.settle()


def test_what_is_flushed_is_computed_again() -> None:
    sim = simulation("a")
    sim.complete(HELLO, 5, ignore_eos=True)
    actions = sim.handle(FlushRequested(7, frozenset("a")))
    assert [action.flush_id for action in actions if isinstance(action, Flushed)] == [7]
    sim.complete(HELLO, 5, ignore_eos=True)
    [*_, prefill] = sim.sent(Prefill)
    assert prefill.chunks[0].start == 0
    sim.check_at_rest()

"""A request waits for a busy shard that has its prefix if that costs less than computing it elsewhere, but not long."""

from caravan_proto.messages.limits import LayoutLimits
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.planning.prompts_under_way import PrefixIndex
from caravan_scheduler.planning.shard_index import ShardQueues
from caravan_scheduler.waiting.queue import WaitingQueue
from caravan_testing.ledgers import index_of, ledger, limits_of, run, sequence, start
from caravan_testing.simulation import Simulation

PROMPT = range(1, 101)


def test_hashes_are_equal_where_prefixes_are_equal() -> None:
    first, second = sequence(1, range(200)), sequence(2, [*range(100), *range(300, 400)])
    assert len(first.prefix_hashes(200)) == 4, "16, 32, 64 and 128 tokens"
    assert first.prefix_hashes(200)[:3] == second.prefix_hashes(200)[:3]
    assert first.prefix_hashes(200)[3] != second.prefix_hashes(200)[3]
    assert first.prefix_hashes(63) == first.prefix_hashes(200)[:2]
    assert sequence(3, range(200), adapter="x").prefix_hashes(16) != first.prefix_hashes(16)
    assert sequence(4, range(15)).prefix_hashes(15) == ()


def test_the_index_returns_the_shards_with_the_longest_known_prefix() -> None:
    index = PrefixIndex[str]()
    index.add("a", (1, 2, 3))
    index.add("a", (1, 2))
    index.add("b", (1, 2))
    assert set(index.holders((1, 2, 3, 4))) == {"a"}
    assert set(index.holders((1, 2, 9))) == {"a", "b"}
    assert set(index.may_hold((1, 9)) or ()) == {"a", "b"}
    assert index.may_hold(()) is None, "too short to tell"
    assert not index.holders((9,))
    index.remove("a", (1, 2, 3))
    assert set(index.holders((1, 2, 3, 4))) == {"a", "b"}
    index.forget("b")
    assert set(index.holders((1, 2, 3, 4))) == {"a"}
    index.remove("a", (1, 2))
    assert not index.holders((1, 2, 3, 4))


def test_a_queue_is_taken_by_priority_then_arrival_and_late_ones_leave_it() -> None:
    queues = ShardQueues()
    low, high, late = sequence(1), sequence(2, priority=1), sequence(3)
    for one, until_s in ((low, 5.0), (high, 6.0), (late, 1.0)):
        queues.push("a", one, until_s)
    assert list(queues.pop_late(0.5)) == []
    assert list(queues.pop_late(1.0)) == [late]
    assert queues.length("a") == 2
    assert queues.pop("a", 1) == [high]
    assert queues.pop_all() == [low]
    assert queues.length("a") == 0
    assert list(queues.pop_late(9.0)) == [], "they have left"


def test_a_deferred_request_stays_in_the_queue_and_is_not_asked_for() -> None:
    queue = WaitingQueue(max_bypass=4)
    first, second = sequence(1), sequence(2)
    queue.push(first)
    queue.push(second)
    queue.defer(first)
    assert list(queue) == [first, second]
    assert list(queue.in_order(0.0)) == [second]
    queue.remove(second)
    assert len(queue) == 1
    assert not queue.is_anyone_asked_for
    queue.requeue(first)
    assert list(queue.in_order(0.0)) == [first]
    queue.defer(first)
    queue.remove(first)
    queue.requeue(first)
    assert len(queue) == 0


def test_what_sequences_hold_is_found_until_it_is_given_up() -> None:
    shard = ledger("a", limits_of(max_sequences=1))
    ended = run(shard, sequence(1, PROMPT))
    index = index_of(shard)
    waiting = sequence(2, PROMPT)
    assert [one for _, one in index.busy_holders(waiting)] == [shard], "full"
    shard.finish(ended)
    index.update("a", may_start=True)
    assert index.busy_holders(waiting) == [], "it can take a request"
    assert "a" in (index.prefixes.may_hold(waiting.prompt_hashes) or ())
    shard.evict_all()
    index.update("a", may_start=True)
    assert not index.prefixes.may_hold(waiting.prompt_hashes)


def test_a_shard_that_drains_is_not_waited_for() -> None:
    shard = ledger("a")
    start(shard, sequence(1, PROMPT))
    index = index_of(shard)
    assert index.speeds.wait_s(shard) == 0.0
    shard.drain.begin(0.0)
    assert index.speeds.wait_s(shard) == float("inf")


LIMITS = ShardLimits(layout=LayoutLimits(cells=2000, cells_per_sequence=2000), max_sequences=4, max_batch_tokens=256)


def two_shards() -> Simulation:
    """Return shards of which "a" has the prefix PROMPT and computes another prompt, and "b" is idle."""
    sim = Simulation(SchedulerConfig())
    sim.join("a", LIMITS)
    sim.submit((*PROMPT, 900), 1)
    sim.run()
    sim.submit(tuple(range(2000, 2064)), 200, ignore_eos=True)
    sim.join("b", LIMITS)
    assert [len(shard.stays.residents) for shard in sim.scheduler.shards.values()] == [1, 0]
    return sim


def test_a_request_waits_for_the_step_of_the_shard_that_has_its_prefix() -> None:
    sim = two_shards()
    waits = sim.submit((*PROMPT, 901), 1)
    assert [one.request_id for one in sim.scheduler.waiting] == [waits]
    sim.advance("a")
    assert len(sim.scheduler.shards["a"].stays.residents) == 2
    sim.run()
    sim.check_at_rest()


def test_it_starts_elsewhere_if_that_takes_too_long() -> None:
    sim = two_shards()
    sim.submit((*PROMPT, 901), 1)
    sim.tick(5.0)
    assert len(sim.scheduler.shards["b"].stays.residents) == 1
    sim.run()
    sim.check_at_rest()


def test_it_starts_elsewhere_if_that_shard_is_lost_and_is_gone_if_it_is_cancelled() -> None:
    sim = two_shards()
    waits = sim.submit((*PROMPT, 901), 1)
    sim.cancel(waits)
    assert len(sim.scheduler.waiting) == 0
    sim.submit((*PROMPT, 902), 1)
    sim.lose("a")
    assert len(sim.scheduler.waiting) == 0
    sim.run()
    sim.check_at_rest()

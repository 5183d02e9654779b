"""In the split layout, running sequences have neighbouring ids: each gap between them takes llama.cpp one pass more."""

import random

from caravan_proto.messages.limits import KvLayout, Saving
from caravan_scheduler.planning.planner import to_save
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.resident import Resident
from caravan_testing.ledgers import SAVING, ledger, limits_of, run, sequence, start
from caravan_testing.simulation import simulation

SPLIT = limits_of(cells=1600, layout=KvLayout.SPLIT, **SAVING)


def runs_on(shard: ShardLedger, number: int) -> Resident:
    return run(shard, sequence(number, range(100 * number, 100 * number + 40)))


def passes(ids: list[int]) -> int:
    """Return into how many runs of neighbours ``ids`` fall."""
    return sum(one - 1 not in ids for one in ids)


def test_what_is_parked_below_a_running_sequence_is_saved_at_once() -> None:
    shard = ledger(limits=SPLIT)
    first, second, third = (runs_on(shard, number) for number in range(3))
    shard.finish(second)
    shard.finish(first)
    assert to_save(shard, 0.0, 0) == [first], "the lowest first"
    shard.finish(third)
    assert to_save(shard, 0.0, 0) == [], "nothing runs"


def test_a_long_sequence_is_not_saved_for_the_sake_of_neighbours() -> None:
    shard = ledger(limits=SPLIT)
    long, _ = (runs_on(shard, number) for number in range(2))
    shard.finish(long)
    shard.costs.copy_cell_s = 0.01
    assert to_save(shard, 0.0, 0) == []


def test_while_others_run_the_lowest_id_is_taken_that_is_free_or_saved() -> None:
    shard = ledger(limits=SPLIT)
    residents = [runs_on(shard, number) for number in range(3)]
    shard.finish(residents[0])
    assert start(shard, sequence(7)).sequence_id == 3, "what is not saved stays"
    shard.save(to_save(shard, 0.0, 0), release=False)
    assert start(shard, sequence(8)).sequence_id == 0


def test_while_nothing_runs_a_free_id_is_taken_first() -> None:
    shard = ledger(limits=SPLIT)
    shard.finish(runs_on(shard, 0))
    shard.save(to_save(shard, 10.0, 0), release=False)
    assert start(shard, sequence(7)).sequence_id == 1


def mean_passes(saving: Saving) -> float:
    """Return how many passes a step takes on average of four clients of a shard with sixteen ids."""
    limits = limits_of(cells=16 * 400, max_sequences=16, memory_bytes=1 << 20, layout=KvLayout.SPLIT, saving=saving)
    sim = simulation("a", limits=limits)
    draw = random.Random(3)
    asked, steps, total = 0, 0, 0
    while asked < 160:
        while asked - len(sim.finished) < 4:
            prompt = tuple(draw.randrange(1, 10_000) for _ in range(draw.randrange(20, 60)))
            sim.submit(prompt, draw.randrange(5, 60), ignore_eos=True)
            asked += 1
        sim.advance("a")
        if asked > 40:  # each id has been used
            total += passes(list(sim.scheduler.shards["a"].stays.residents))
            steps += 1
    return total / steps


def test_four_clients_of_sixteen_ids_have_neighbouring_ones() -> None:
    """Where nothing can be saved, what has ended is kept in cells instead, and the ids scatter."""
    assert mean_passes(Saving.ANY) < 1.7 < 2.5 < mean_passes(Saving.NOTHING)

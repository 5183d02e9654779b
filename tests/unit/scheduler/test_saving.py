"""Which ended sequences are saved, and when."""

import pytest

from caravan_proto.messages.limits import KvLayout, Saving
from caravan_scheduler.planning.planner import to_save
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_testing.ledgers import SAVING, ledger, limits_of, run, sequence

LATER = 10.0
SPLIT = limits_of(cells=1600, layout=KvLayout.SPLIT, max_sequences=2, **SAVING)


def ended(shard: ShardLedger, number: int) -> None:
    shard.finish(run(shard, sequence(number, range(100 * number, 100 * number + 40))))


def numbers(shard: ShardLedger, now: float = LATER, waiting: int = 0) -> list[int]:
    return [resident.request_id for resident in to_save(shard, now, waiting)]


def test_where_cells_are_shared_they_are_saved_at_once() -> None:
    shard = ledger(limits=limits_of(**SAVING))
    run(shard, sequence(1))
    ended(shard, 2)
    ended(shard, 3)
    assert numbers(shard, 0.0) == [2, 3]
    assert numbers(shard, waiting=1) == [], "a request that waits may start from them"


def test_where_they_cost_nothing_they_stay_while_there_is_a_free_id() -> None:
    shard = ledger(limits=limits_of(cells=1600, layout=KvLayout.SPLIT, max_sequences=3, **SAVING))
    run(shard, sequence(1))
    ended(shard, 2)
    assert numbers(shard) == []
    ended(shard, 3)
    assert numbers(shard) == [2], "the one whose id the next request takes"


def test_an_idle_shard_saves_one_after_another() -> None:
    shard = ledger(limits=SPLIT)
    ended(shard, 1)
    assert numbers(shard, 0.1) == [], "its client may ask again at once"
    assert numbers(shard) == [1]
    shard.save(to_save(shard, LATER, 0), release=False)
    assert numbers(shard) == []


@pytest.mark.parametrize("limits", [limits_of(), limits_of(memory_bytes=1, saving=Saving.NOTHING)])
def test_nothing_is_saved_where_it_cannot_be(limits: object) -> None:
    shard = ledger(limits=limits)  # type: ignore[arg-type]
    ended(shard, 1)
    assert numbers(shard) == []

"""Who gives way to whom, and how."""

import functools

import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.actions import Preemption
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.forecast import CellForecast
from caravan_scheduler.planning.preemption import (
    choose_how,
    victim_of_full_cache,
    victims_of_growth,
    victims_of_priority,
)
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.resident import Resident
from caravan_testing.ledgers import SAVING, ledger, limits_of, run, send_decode, sequence, start

SWAPS = limits_of(**SAVING)


def requests(residents: list[Resident]) -> list[int]:
    return [resident.request_id for resident in residents]


def filled(cells: int, priorities: list[int], **limits: object) -> ShardLedger:
    """A shard on which requests 1, 2, ... with these priorities have 20 tokens each."""
    shard = ledger(limits=limits_of(cells=cells, **limits))  # type: ignore[arg-type]
    for number, priority in enumerate(priorities, 1):
        run(shard, sequence(number, range(100 * number, 100 * number + 20)), priority=priority)
    return shard


def victims_for(shard: ShardLedger, waiting: Sequence) -> list[int]:
    return requests(victims_of_priority(shard, waiting, functools.partial(CellForecast, shard, OutputLengths(), 0.0)))


def test_nobody_is_preempted_while_the_next_step_has_its_cells() -> None:
    assert victims_of_growth(filled(63, [0, 0, 0])) == []


def test_the_lowest_priority_goes_first_and_then_the_newest() -> None:
    assert requests(victims_of_growth(filled(61, [1, 0, 0]))) == [3, 2]


def test_a_lone_resident_is_never_preempted() -> None:
    assert victims_of_growth(filled(20, [0])) == []


def test_sequences_with_cells_of_their_own_are_never_preempted_for_growth() -> None:
    assert victims_of_growth(filled(60, [0, 0, 0], layout=KvLayout.SPLIT, cells_per_sequence=20)) == []


def test_lower_priorities_give_way_until_the_request_fits() -> None:
    shard = filled(100, [0, 0, 1])
    assert victims_for(shard, sequence(9, range(20), max_new_tokens=5, priority=1)) == [2]
    assert victims_for(shard, sequence(9, range(40), max_new_tokens=20, priority=1)) == [2, 1]


def test_nobody_gives_way_where_it_would_not_help() -> None:
    shard = filled(100, [0, 1, 1])
    assert victims_for(shard, sequence(9, range(60), max_new_tokens=30, priority=1)) == []


def test_equal_priorities_do_not_give_way() -> None:
    assert victims_for(filled(70, [0, 0, 0]), sequence(9, range(20))) == []


def test_nobody_gives_way_on_a_shard_that_drains_or_is_too_small() -> None:
    shard = filled(70, [0, 0, 0])
    assert victims_for(shard, sequence(9, range(50), max_new_tokens=50, priority=1)) == []
    shard.drain.begin(0.0)
    assert victims_for(shard, sequence(9, range(20), priority=1)) == []


def test_the_newest_of_a_failed_command_gives_way_to_a_full_cache() -> None:
    shard = filled(100, [5, 0, 0])
    first, second, third = shard.stays.residents.values()
    command = send_decode(shard, first, second)
    assert victim_of_full_cache(shard, command) is second
    shard.take_back(second)
    assert victim_of_full_cache(shard, command) is first
    shard.take_back(first)
    assert victim_of_full_cache(shard, command) is None
    assert third.is_live, "it was not in the command"


@pytest.mark.parametrize(
    ("copy_cell_s", "how"),
    [(1e-6, Preemption.SWAP), (1.0, Preemption.RECOMPUTE)],
)
def test_what_was_measured_to_cost_less_is_chosen(copy_cell_s: float, how: Preemption) -> None:
    shard = ledger(limits=SWAPS)
    resident = run(shard, sequence(1, range(10)))
    shard.costs.copy_cell_s = copy_cell_s
    assert choose_how(shard, resident) is how


def test_without_memory_for_it_or_anything_computed_it_is_computed_again() -> None:
    resident = run(ledger(), sequence(1))
    assert choose_how(ledger(), resident) is Preemption.RECOMPUTE
    shard = ledger(limits=SWAPS)
    assert choose_how(shard, start(shard, sequence(2))) is Preemption.RECOMPUTE

"""Where a request starts, or why it does not start now."""

from collections.abc import Iterable

from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.placement import EmptierShard, NoRoom, NotYet, Place, choose
from caravan_scheduler.planning.prompts_under_way import AwaitedPrompt
from caravan_scheduler.planning.step_plan import PlanInput, StepPlan
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.resident import Resident
from caravan_testing.ledgers import (
    LIMITS,
    SAVING,
    index_of,
    ledger,
    limits_of,
    loaded,
    run,
    sequence,
    start,
    succeed,
    swap_out,
)

PROMPT = range(1, 101)


def plans_of(shards: Iterable[ShardLedger], adapter: str = "") -> dict[ShardLedger, StepPlan]:
    given = PlanInput(config=SchedulerConfig(), lengths=OutputLengths(), now=0.0, waiting=1, adapter=adapter)
    return {shard: StepPlan(shard, given) for shard in shards if shard.commands.can_begin}


def chosen(shards: list[ShardLedger], waiting: Sequence) -> Place | NotYet:
    return choose(index_of(*shards), plans_of(shards, waiting.spec.adapter), waiting).answer


def shard_of(place: Place | NotYet) -> str:
    assert isinstance(place, Place), place
    return place.shard.name


def test_the_shard_that_holds_more_of_the_prompt_is_preferred() -> None:
    first, second = ledger("a"), ledger("b")
    second.finish(run(second, sequence(1, PROMPT)))
    place = chosen([first, second], sequence(2, PROMPT))
    assert shard_of(place) == "b"
    assert isinstance(place, Place)
    assert place.match.length == 98


def test_the_shard_with_fewer_residents_is_preferred() -> None:
    first, second = ledger("a"), ledger("b")
    run(first, sequence(1, range(200, 220)))
    assert shard_of(chosen([first, second], sequence(2, PROMPT))) == "b"


def test_a_long_prefix_outweighs_a_resident_and_a_short_one_does_not() -> None:
    first, second = ledger("a"), ledger("b")
    run(first, sequence(1, PROMPT))
    assert shard_of(chosen([first, second], sequence(2, PROMPT))) == "a"
    assert shard_of(chosen([first, second], sequence(3, range(1, 51)))) == "b", "64 tokens a resident"


def test_among_equal_shards_the_one_with_more_free_cells_then_the_first_by_name() -> None:
    first, second = ledger("a"), ledger("b", limits_of(cells=500))
    assert shard_of(chosen([first, second], sequence(1))) == "b"
    assert shard_of(chosen([ledger("d"), ledger("c")], sequence(1))) == "c"


def test_without_a_shard_that_takes_it_there_is_no_room() -> None:
    full, draining, busy = ledger("a", limits_of(max_sequences=1)), ledger("b"), ledger("c")
    run(full, sequence(1))
    draining.drain.begin(0.0)
    start(busy, sequence(2))
    assert chosen([full, draining, busy], sequence(3)) == NoRoom()
    assert chosen([], sequence(3)) == NoRoom()


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    first, second = ledger("a"), ledger("b")
    for number in (1, 2):
        run(second, sequence(number, range(100 * number, 100 * number + 20)))
    leader = start(first, sequence(3, PROMPT))
    answer = chosen([first, second], sequence(4, PROMPT))
    assert isinstance(answer, AwaitedPrompt)
    assert (answer.leader, answer.length) == (leader, 98)


def test_a_prefix_is_not_waited_for_where_starting_elsewhere_is_cheaper() -> None:
    first, second = ledger("a"), ledger("b")
    start(first, sequence(1, PROMPT))
    assert shard_of(chosen([first, second], sequence(2, PROMPT))) == "b"


def test_a_short_prefix_or_one_of_another_adapter_is_not_waited_for() -> None:
    first, second = ledger("a"), ledger("b")
    start(first, sequence(1, PROMPT))
    assert shard_of(chosen([first, second], sequence(2, [*range(1, 15), 300]))) == "b"
    assert shard_of(chosen([first, second], sequence(3, PROMPT, adapter="x"))) == "b"


def test_nobody_waits_for_a_prefix_of_lower_priority_or_for_one_that_gives_no_prompt_logprobs() -> None:
    first, second = ledger("a"), ledger("b")
    start(first, sequence(1, PROMPT), priority=0)
    assert shard_of(chosen([first, second], sequence(2, PROMPT, priority=1))) == "b"
    assert shard_of(chosen([first, second], sequence(3, PROMPT, prompt_logprobs=True))) == "b"


def test_a_prompt_whose_logprobs_are_wanted_waits_for_a_prefix_that_gives_them() -> None:
    first, second = ledger("a"), ledger("b")
    for number in (1, 2):
        run(second, sequence(number, range(100 * number, 100 * number + 20)))
    start(first, sequence(3, PROMPT, prompt_logprobs=True))
    assert isinstance(chosen([first, second], sequence(4, PROMPT, prompt_logprobs=True)), AwaitedPrompt)
    assert isinstance(chosen([first, second], sequence(5, PROMPT)), AwaitedPrompt)


def test_nobody_waits_for_a_shard_that_drains_or_can_only_copy_whole_sequences() -> None:
    for limits, drains in ((LIMITS, True), (limits_of(whole_only=True), False)):
        first, second = ledger("a", limits), ledger("b")
        start(first, sequence(1, PROMPT))
        if drains:
            first.drain.begin(0.0)
        assert shard_of(chosen([first, second], sequence(2, PROMPT))) == "b"


def test_an_emptier_shard_that_will_take_it_after_one_step_is_waited_for() -> None:
    first, second = ledger("a"), ledger("b")
    start(first, sequence(1, range(200, 220)))
    for number in (2, 3):
        run(second, sequence(number, range(100 * number, 100 * number + 20)))
    assert chosen([first, second], sequence(4)) == EmptierShard(first)
    succeed(first, first.commands.in_flight[-1])
    assert shard_of(chosen([first, second], sequence(4))) == "a"


def test_a_swapped_sequence_returns_to_where_its_cells_are() -> None:
    first, second = ledger("a", limits_of(**SAVING)), ledger("b")
    back = sequence(1, PROMPT)
    swap_out(first, run(first, back))
    run(first, sequence(2, range(200, 220)))
    place = chosen([first, second], back)
    assert isinstance(place, Place)
    assert (place.shard.name, place.saved.length) == ("a", len(PROMPT))


def loading(shard: ShardLedger, prompt: Iterable[int]) -> Resident:
    """Let a request with this prompt be loaded from what ``shard`` has saved of another one."""
    swap_out(shard, run(shard, sequence(1, PROMPT)))
    leader = sequence(2, prompt)
    place = chosen([shard], leader)
    assert isinstance(place, Place)
    assert place.saved.length > 0
    plan = plans_of([shard])[shard]
    resident = plan.load(leader, place.match, place.saved)
    plan.send(1)
    shard.apply_load(shard.commands.in_flight[-1], loaded(True))
    shard.commands.end(shard.commands.in_flight[-1])
    return resident


def test_a_prefix_that_another_request_has_loaded_is_waited_for_where_cells_are_shared() -> None:
    shard = ledger("a", limits_of(**SAVING))
    loading(shard, PROMPT)
    assert isinstance(chosen([shard], sequence(3, PROMPT)), AwaitedPrompt)
    split = ledger("a", limits_of(layout=KvLayout.SPLIT, cells=1600, **SAVING))
    loading(split, PROMPT)
    place = chosen([split], sequence(3, PROMPT))
    assert isinstance(place, Place)
    assert place.saved.length > 0
    assert place.match.length == 0


def test_a_longer_saved_prefix_is_loaded_behind_the_cells_that_another_request_has() -> None:
    shard = ledger("a", limits_of(cells=1000, cells_per_sequence=1000, **SAVING))
    back = sequence(1, [*range(1, 60), *range(200, 300)])
    swap_out(shard, run(shard, back))
    run(shard, sequence(2, PROMPT))
    place = chosen([shard], back)
    assert isinstance(place, Place)
    assert (place.match.length, place.saved.length) == (59, 159)


def test_a_loaded_prefix_is_waited_for_no_longer_than_until_it_is_there() -> None:
    """The leader has many tokens of its own to compute."""
    shard = ledger("a", limits_of(cells=1000, cells_per_sequence=1000, max_batch_tokens=256, **SAVING))
    leader = loading(shard, [*PROMPT, *range(500, 900)])
    follower = sequence(3, [*PROMPT, 7, 8, 9])
    awaited = chosen([shard], follower)
    assert isinstance(awaited, AwaitedPrompt)
    assert not awaited.is_over(0.0)
    plans_of([shard])[shard].send(2)
    succeed(shard, shard.commands.in_flight[-1])
    assert leader.computed < leader.target
    assert awaited.is_over(0.0)
    place = chosen([shard], follower)
    assert isinstance(place, Place)
    assert (place.match.length, place.saved.length) == (100, 0)


def test_what_is_saved_is_computed_again_where_loading_takes_longer() -> None:
    shard = ledger("a", limits_of(**SAVING))
    back = sequence(1, PROMPT)
    swap_out(shard, run(shard, back))
    shard.costs.copy_cell_s = 1.0
    place = chosen([shard], back)
    assert isinstance(place, Place)
    assert place.cached == 0


def test_a_swapped_sequence_is_computed_elsewhere_if_its_shard_has_no_place() -> None:
    first, second = ledger("a", limits_of(max_sequences=1, **SAVING)), ledger("b")
    back = sequence(1, PROMPT)
    swap_out(first, run(first, back))
    run(first, sequence(2, range(200, 220)))
    assert chosen([first], back) == NoRoom()
    assert shard_of(chosen([first, second], back)) == "b"

"""Where a request starts, and which ones wait for the shard that has their prefix."""

from collections.abc import Iterable

from caravan_proto.messages.limits import KvLayout, LayoutLimits
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.placement import BusyHolder, EmptierShard, NoRoom, NotYet, Place, choose
from caravan_scheduler.planning.prompts_under_way import AwaitedPrompt, PrefixIndex
from caravan_scheduler.planning.shard_index import ShardQueues
from caravan_scheduler.planning.step_plan import PlanInput, StepPlan
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.waiting.queue import WaitingQueue
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
from caravan_testing.simulation import Simulation

PROMPT = range(1, 101)


WIDE = ShardLimits(layout=LayoutLimits(cells=2000, cells_per_sequence=2000), max_sequences=4, max_batch_tokens=256)


def plans_of(shards: Iterable[ShardLedger], adapter: str = "") -> dict[ShardLedger, StepPlan]:
    given = PlanInput(
        config=SchedulerConfig(),
        lengths=OutputLengths(),
        now=0.0,
        waiting=1,
        urgent=1,
        bulk_step_s=0.02,
        is_fleet_idle=False,
        adapter=adapter,
    )
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


def test_a_busy_shard_that_has_saved_the_prefix_is_waited_for() -> None:
    limits = limits_of(cells=1000, cells_per_sequence=1000, **SAVING)
    holder, idle = ledger("a", limits), ledger("b", limits)
    swap_out(holder, run(holder, sequence(1, PROMPT)))
    start(holder, sequence(2, range(500, 520)))
    answer = chosen([holder, idle], sequence(3, [*PROMPT, 7]))
    assert isinstance(answer, BusyHolder)
    assert answer.shard is holder
    assert shard_of(chosen([holder, idle], sequence(4, range(200, 300)))) == "b"


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


def test_hashes_are_equal_where_prefixes_are_equal() -> None:
    first, second = sequence(1, range(200)), sequence(2, [*range(100), *range(300, 400)])
    assert len(first.prefix_hashes(200)) == 4, "16, 32, 64 and 128 tokens"
    assert first.prefix_hashes(200)[:3] == second.prefix_hashes(200)[:3]
    assert first.prefix_hashes(200)[3] != second.prefix_hashes(200)[3]
    assert first.prefix_hashes(63) == first.prefix_hashes(200)[:2]
    assert sequence(3, range(200), adapter="x").prefix_hashes(16) != first.prefix_hashes(16)
    assert sequence(4, range(15)).prefix_hashes(15) == ()


def test_a_sequence_takes_the_hashes_of_the_blocks_that_it_finds_in_the_cells_of_another() -> None:
    known, later = sequence(1, range(100)), sequence(2, [*range(70), *range(300, 330)])
    hashes = sequence(3, later.spec.prompt).block_hashes(100)
    later.take_block_hashes(known, 70)
    assert later.block_hashes(100) == hashes, "there were none to take"
    known.block_hashes(100)
    later = sequence(4, later.spec.prompt)
    later.take_block_hashes(known, 70)
    assert later.block_hashes(100) == hashes
    assert later.block_hashes(100)[0] is known.block_hashes(100)[0]
    assert later.block_hashes(100, 4) == hashes[4:]


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
    assert [one for _, _, one in index.busy_holders(waiting)] == [shard], "full"
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


def two_shards() -> Simulation:
    """Return shards of which "a" has the prefix PROMPT and computes another prompt, and "b" is idle."""
    sim = Simulation(SchedulerConfig())
    sim.join("a", WIDE)
    sim.complete((*PROMPT, 900), 1)
    sim.submit(tuple(range(2000, 2064)), 200, ignore_eos=True)
    sim.join("b", WIDE)
    assert [len(shard.stays.residents) for shard in sim.scheduler.shards.values()] == [1, 0]
    return sim


def test_a_request_waits_for_the_step_of_the_shard_that_has_its_prefix() -> None:
    sim = two_shards()
    waits = sim.submit((*PROMPT, 901), 1)
    assert [one.request_id for one in sim.scheduler.waiting] == [waits]
    sim.advance("a")
    assert len(sim.scheduler.shards["a"].stays.residents) == 2
    sim.settle()


def test_it_starts_elsewhere_if_that_takes_too_long() -> None:
    sim = two_shards()
    sim.submit((*PROMPT, 901), 1)
    sim.tick(5.0)
    assert len(sim.scheduler.shards["b"].stays.residents) == 1
    sim.settle()


def test_it_starts_elsewhere_if_that_shard_is_lost_and_is_gone_if_it_is_cancelled() -> None:
    sim = two_shards()
    waits = sim.submit((*PROMPT, 901), 1)
    sim.cancel(waits)
    assert len(sim.scheduler.waiting) == 0
    sim.submit((*PROMPT, 902), 1)
    sim.lose("a")
    assert len(sim.scheduler.waiting) == 0
    sim.settle()

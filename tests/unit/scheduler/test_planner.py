"""What a plan decides, who is preempted, and what a plan looks at."""

import functools
import sys
from collections.abc import Iterable
from types import FrameType

import pytest
from bench.plan_cost import Case, FullFleet

from caravan_proto.messages.commands import Decode, Prefill, Save
from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.actions import Action, Preempt, Preemption, Start
from caravan_scheduler.config import PrefillMode, SchedulerConfig
from caravan_scheduler.events import Event
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.forecast import CellForecast
from caravan_scheduler.planning.planner import Planner
from caravan_scheduler.planning.preemption import (
    choose_how,
    victim_of_full_cache,
    victims_of_growth,
    victims_of_priority,
)
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import find_match
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.state import SchedulerState
from caravan_testing.ledgers import SAVING, ledger, limits_of, run, send_decode, send_prefill, sequence, start, succeed
from caravan_testing.requests import request

SMALL = limits_of(cells=100, cells_per_sequence=100)


SWAPS = limits_of(**SAVING)


class Desk:
    """A planner and its state. Requests enter it and stay on shards as a test says."""

    def __init__(self, *shards: ShardLedger, config: SchedulerConfig | None = None) -> None:
        self.state = SchedulerState(config or SchedulerConfig())
        self.state.shards |= {shard.name: shard for shard in shards}
        self._planner = Planner(self.state)

    def wait(self, request_id: int, tokens: int, *, max_new_tokens: int = 10, priority: int = 0) -> None:
        prompt = range(1000 * request_id, 1000 * request_id + tokens)
        self.state.enter(request(request_id, prompt, max_new_tokens, priority=priority))
        self.state.waiting.mark_due()

    def run(self, shard: ShardLedger, request_id: int, tokens: int, *, max_new_tokens: int = 50) -> None:
        """Let a new request run on ``shard``, its prompt computed."""
        self.wait(request_id, tokens, max_new_tokens=max_new_tokens)
        sequence = self.state.sequences[request_id]
        self.state.waiting.remove(sequence)
        resident = shard.place(sequence, find_match(shard, sequence), 0)
        send_prefill(shard, resident)
        succeed(shard, shard.commands.in_flight[-1])
        self.state.stay(sequence, shard, resident)
        sequence.output.append(1)
        self.state.outbox.drain()

    def plan(self, *, preempted: bool = False) -> list[Action]:
        for name in self.state.shards:
            self.state.note_change(name, may_start=False)
        self._planner.plan(0.0, preempted=preempted)
        return self.state.outbox.drain()

    @property
    def waiting(self) -> list[int]:
        return [sequence.request_id for sequence in self.state.waiting]


def started(actions: list[Action]) -> list[int]:
    return [action.request_id for action in actions if isinstance(action, Start)]


def test_nothing_is_planned_without_shards_or_requests() -> None:
    assert Desk().plan() == []
    assert Desk(ledger()).plan() == []


def test_requests_that_wait_start_together() -> None:
    desk = Desk(ledger())
    desk.wait(1, 20)
    desk.wait(2, 20)
    actions = desk.plan()
    assert started(actions) == [1, 2]
    (prefill,) = (action for action in actions if isinstance(action, Prefill))
    assert len(prefill.chunks) == 2
    assert desk.waiting == []


def test_requests_are_spread_over_shards() -> None:
    first, second = ledger("a"), ledger("b")
    desk = Desk(first, second)
    for number in range(1, 5):
        desk.wait(number, 20)
    desk.plan()
    assert (len(first.stays.residents), len(second.stays.residents)) == (2, 2)


def test_a_shard_that_decodes_is_left_alone_until_something_may_start() -> None:
    shard = ledger()
    desk = Desk(shard)
    desk.run(shard, 1, 20)
    desk.wait(2, 20)
    desk.state.waiting.begin_admission(0.0)
    send_decode(shard, *shard.stays.residents.values())
    assert desk.plan() == []
    desk.state.waiting.mark_due()
    assert started(desk.plan()) == [2]


def test_in_pause_mode_every_step_may_let_a_request_start() -> None:
    config = SchedulerConfig(mode=PrefillMode.PAUSE)
    shard = ledger(config=config)
    desk = Desk(shard, config=config)
    desk.run(shard, 1, 20)
    desk.wait(2, 20)
    desk.state.waiting.begin_admission(0.0)
    send_decode(shard, *shard.stays.residents.values())
    assert started(desk.plan()) == [2]


def test_nobody_is_admitted_in_a_step_that_took_cells() -> None:
    shard = ledger()
    desk = Desk(shard)
    desk.run(shard, 1, 20)
    desk.wait(2, 20)
    actions = desk.plan(preempted=True)
    assert [type(action) for action in actions] == [Decode]
    assert desk.waiting == [2]


def test_without_cells_for_the_next_step_the_newest_gives_way_and_nobody_starts() -> None:
    shard = ledger(limits=limits_of(cells=41, cells_per_sequence=41))
    desk = Desk(shard)
    desk.run(shard, 1, 20, max_new_tokens=20)
    desk.run(shard, 2, 20, max_new_tokens=20)
    desk.wait(3, 1, max_new_tokens=1)
    actions = desk.plan()
    assert Preempt(2, Preemption.RECOMPUTE) in actions
    assert started(actions) == []
    assert desk.waiting == [2, 3]


def test_where_saving_is_cheaper_the_victim_is_swapped_out_by_a_command_of_its_own() -> None:
    shard = ledger(limits=limits_of(cells=41, cells_per_sequence=41, **SAVING))
    desk = Desk(shard)
    desk.run(shard, 1, 20, max_new_tokens=20)
    desk.run(shard, 2, 20, max_new_tokens=20)
    (command,) = desk.plan()
    assert isinstance(command, Save)
    (entry,) = command.entries
    assert (entry.sequence_id, entry.start, entry.release) == (1, 0, True)
    assert desk.waiting == [], "it waits again when the shard has answered"


def test_the_first_in_order_takes_the_place_of_lower_priorities() -> None:
    shard = ledger(limits=SMALL)
    desk = Desk(shard)
    desk.run(shard, 1, 20)
    desk.run(shard, 2, 20)
    desk.wait(3, 40, priority=1)
    desk.wait(4, 5, priority=1)
    actions = desk.plan()
    assert Preempt(2, Preemption.RECOMPUTE) in actions
    assert started(actions) == [3], "it starts, and nobody else in the same step"
    assert desk.waiting == [2, 4]


def test_nobody_is_preempted_for_an_equal_priority() -> None:
    shard = ledger(limits=SMALL)
    desk = Desk(shard)
    desk.run(shard, 1, 20)
    desk.run(shard, 2, 20)
    desk.wait(3, 40)
    actions = desk.plan()
    assert [type(action) for action in actions] == [Decode]
    assert desk.waiting == [3]


def test_a_request_without_room_is_passed_by_its_equals_and_not_by_lower_priorities() -> None:
    shard = ledger(limits=SMALL)
    desk = Desk(shard)
    desk.run(shard, 1, 40, max_new_tokens=20)
    desk.wait(2, 60)
    desk.wait(3, 5, max_new_tokens=2)
    desk.wait(4, 5, max_new_tokens=2, priority=-1)
    assert started(desk.plan()) == [3]
    assert desk.waiting == [2, 4]


def test_a_shard_kept_for_another_adapter_decodes_if_nobody_can_start() -> None:
    shard = ledger(limits=SMALL)
    desk = Desk(shard)
    desk.run(shard, 1, 60, max_new_tokens=30)
    desk.state.enter(request(2, range(60), 30, adapter="x"))
    desk.state.waiting.mark_due()
    while not shard.commands.turn.is_over:
        shard.commands.turn.count_step()
    (command,) = desk.plan()
    assert isinstance(command, Decode)
    assert desk.waiting == [2]


def test_commands_are_numbered_without_repetition() -> None:
    first, second = ledger("a"), ledger("b")
    desk = Desk(first, second)
    for number in range(1, 3):
        desk.wait(number, 20)
    ids = [action.command_id for action in desk.plan() if isinstance(action, Prefill)]
    assert len(set(ids)) == len(ids) == 2


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

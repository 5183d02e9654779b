"""What the planner sends to shards, given what waits and what they hold."""

from caravan_proto.messages.commands import Decode, Prefill, Save
from caravan_scheduler.actions import Action, Preempt, Preemption, Start
from caravan_scheduler.config import PrefillMode, SchedulerConfig
from caravan_scheduler.planning.planner import Planner
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import find_match
from caravan_scheduler.state import SchedulerState
from caravan_testing.ledgers import SAVING, ledger, limits_of, send_decode, send_prefill, succeed
from caravan_testing.requests import request

SMALL = limits_of(cells=100, cells_per_sequence=100)


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

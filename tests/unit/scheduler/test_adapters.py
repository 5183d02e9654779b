"""A step has one adapter. Adapters take turns and share no cells."""

from caravan_proto.messages.commands import Decode, Prefill
from caravan_scheduler.config import PrefillMode, SchedulerConfig
from caravan_scheduler.shard.command import TURN_STEPS, AdapterTurn
from caravan_testing.ledgers import limits_of
from caravan_testing.simulation import Simulation

LIMITS = limits_of(cells=2000, cells_per_sequence=2000, max_sequences=8, max_batch_tokens=128)
PROMPT = tuple(range(1, 41))


def simulation(mode: PrefillMode = PrefillMode.MIXED) -> Simulation:
    result = Simulation(SchedulerConfig(mode=mode))
    result.join("a", LIMITS)
    return result


def received_after(sim: Simulation, steps: int) -> dict[int, int]:
    sim.advance("a", steps)
    return {request_id: len(tokens) for request_id, tokens in sim.received.items()}


def test_two_adapters_and_the_model_itself_advance_side_by_side() -> None:
    for mode in PrefillMode:
        sim = simulation(mode)
        for adapter in ("", "x", "y"):
            for _ in range(2):
                sim.submit(PROMPT, 300, ignore_eos=True, adapter=adapter)
        lengths = received_after(sim, 240).values()
        assert min(lengths) >= 60, f"{mode}: {lengths}"
        assert max(lengths) - min(lengths) <= 3 * TURN_STEPS, f"{mode}: {lengths}"
        sim.settle()
        assert len(sim.finished) == 6


def test_a_new_request_with_another_adapter_waits_for_one_turn() -> None:
    sim = simulation()
    sim.submit(PROMPT, 500, ignore_eos=True)
    received_after(sim, 100)
    late = sim.submit(PROMPT, 5, ignore_eos=True, adapter="x")
    assert received_after(sim, TURN_STEPS + 8)[late] > 0


def test_one_adapter_alone_runs_ahead() -> None:
    sim = simulation()
    sim.complete(PROMPT, 100, ignore_eos=True, adapter="x")
    max_steps = [action.max_steps for action in sim.sent(Decode)]
    assert max_steps[0] == SchedulerConfig().run_ahead_steps


def test_adapters_share_no_cells() -> None:
    sim = simulation()
    for adapter in ("", "x", "x"):
        sim.complete(PROMPT, 4, ignore_eos=True, adapter=adapter)
    copies = [chunk.copy.length if chunk.copy else 0 for action in sim.sent(Prefill) for chunk in action.chunks]
    assert copies == [0, 0, len(PROMPT) - 2]
    sim.check_at_rest()


def test_the_turn_goes_to_the_adapter_that_had_it_longest_ago() -> None:
    turn = AdapterTurn()
    order = []
    for _ in range(9):
        adapter = turn.next({"x", "y", ""})
        turn.take(adapter)
        order.append(adapter)
        while not turn.is_over:
            turn.count_step()
    assert order == ["", "x", "y"] * 3
    assert turn.next({"y"}) == "y"


def test_a_turn_is_kept_until_it_is_over() -> None:
    turn = AdapterTurn()
    turn.take("x")
    turn.count_step()
    assert turn.next({"", "x"}) == "x"
    assert turn.steps_left("x") == TURN_STEPS - 1
    assert turn.next({""}) == "", "nobody wants x any more"

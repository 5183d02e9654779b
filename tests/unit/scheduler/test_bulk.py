"""Bulk work: it runs where nothing else does, costs others little, and neither starves nor loses a token."""

from caravan_proto.messages.commands import Decode, Prefill
from caravan_scheduler.actions import Preempt
from caravan_scheduler.core.generation import BULK_PRIORITY
from caravan_testing.ledgers import limits_of
from caravan_testing.model_outputs import expected_output
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import Simulation, simulation


def named(sim: Simulation, since: int) -> list[set[int]]:
    """The requests in each step from ``since`` on: a shard gives them the lowest ids that are free."""
    return [
        {*(chunk.sequence_id for chunk in action.chunks), *action.ride}
        if isinstance(action, Prefill)
        else set(action.sequence_ids)
        for action in sim.sent(Prefill, Decode, since=since)
        if isinstance(action, Prefill | Decode)
    ]


def outputs_are_right(sim: Simulation) -> bool:
    return all(sim.received[key] == expected_output(one.spec) for key, one in sim.requests.items())


def test_bulk_work_pauses_while_others_run_on_its_shard() -> None:
    sim = simulation(run_ahead_steps=1, run_ahead_s=0.0)
    for number in range(2):
        sim.submit(prompt_of(20, number), 12, ignore_eos=True, priority=BULK_PRIORITY)
    for _ in range(3):
        sim.advance("a")
    before = len(sim.actions)
    other = sim.submit(prompt_of(20, 5), 4, ignore_eos=True)
    while other not in sim.finished:
        sim.advance("a")
    steps = named(sim, before)
    assert steps[0] == {2}, "the step after its arrival has its prompt alone"
    assert all(ids == {2} for ids in steps[:4])
    sim.settle()
    assert outputs_are_right(sim)


def test_bulk_work_does_not_start_beside_others() -> None:
    sim = simulation("a", "b")
    sim.submit(prompt_of(20, 1), 30, ignore_eos=True)
    for number in range(4):
        sim.submit(prompt_of(20, 2 + number), 3, ignore_eos=True, priority=BULK_PRIORITY)
    (busy,) = (one for one in sim.scheduler.shards.values() if not one.stays.bulk)
    assert len(busy.stays.residents) == 1
    sim.settle()
    assert outputs_are_right(sim)


def test_bulk_work_leaves_an_id_free() -> None:
    sim = simulation(limits=limits_of(max_sequences=16, cells=2000))
    for number in range(20):
        sim.submit(prompt_of(10, number), 60, ignore_eos=True, priority=BULK_PRIORITY)
    (shard,) = sim.scheduler.shards.values()
    counts = set()
    for _ in range(30):
        sim.advance("a")
        counts.add(len(shard.stays.residents))
    assert max(counts) == 14
    sim.settle()
    assert outputs_are_right(sim)


def test_prompts_of_bulk_work_alone_are_computed_in_short_steps() -> None:
    chunks: list[int] = []
    for priority in (0, BULK_PRIORITY):
        sim = simulation(bulk_step_s=1e-6)
        sim.complete(prompt_of(50, 3), 3)  # steps are measured
        before = len(sim.actions)
        sim.submit(prompt_of(60, 40), 1, priority=priority)
        (prefill, *_) = sim.sent(Prefill, since=before)
        chunks.append(len(prefill.chunks[0].token_ids))
        sim.settle()
    assert chunks == [60, 16]


def test_prompts_of_bulk_work_are_not_cut_short_before_a_decode_was_measured() -> None:
    sim = simulation(bulk_step_s=1e-6)
    sim.complete(prompt_of(50, 3), 1)  # its only token comes with its prompt
    before = len(sim.actions)
    sim.submit(prompt_of(60, 40), 1, priority=BULK_PRIORITY)
    (prefill, *_) = sim.sent(Prefill, since=before)
    assert isinstance(prefill, Prefill)
    assert len(prefill.chunks[0].token_ids) == 60
    sim.settle()


def test_bulk_work_that_waited_long_counts_as_any_other() -> None:
    sim = simulation(run_ahead_steps=1, run_ahead_s=0.0, aging_s=1.0)
    old = sim.submit(prompt_of(20, 1), 3, ignore_eos=True, priority=BULK_PRIORITY)
    sim.submit(prompt_of(20, 2), 60, ignore_eos=True)
    for _ in range(4):
        sim.advance("a")
    assert old not in sim.finished
    sim.tick(-BULK_PRIORITY + 1.0)
    for _ in range(6):
        sim.advance("a")
    assert old in sim.finished
    sim.settle()
    assert outputs_are_right(sim)


def test_bulk_work_gives_its_cells_to_what_others_may_ask_for_again() -> None:
    sim = simulation(limits=limits_of(max_sequences=8, cells=200))
    for number in range(6):
        sim.submit(prompt_of(20, number), 20, ignore_eos=True, priority=BULK_PRIORITY)
    sim.advance("a")
    for number in range(6):
        sim.complete(prompt_of(20, 20 + number), 2)
    before = len(sim.actions)
    sim.complete((*prompt_of(20, 25), 7), 1)
    (prefill, *_) = sim.sent(Prefill, since=before)
    assert isinstance(prefill, Prefill)
    assert prefill.chunks[0].copy is not None or prefill.chunks[0].start > 0
    sim.settle()
    assert outputs_are_right(sim)


def test_bulk_work_gives_way_in_order() -> None:
    """Not in that of a set of objects, which another run with the same events would not have."""
    sim = simulation(limits=limits_of(max_sequences=9, cells=2000))
    bulk = [sim.submit(prompt_of(20, number), 30, ignore_eos=True, priority=BULK_PRIORITY) for number in range(10)]
    for _ in range(3):
        sim.advance("a")
    for number in range(3):
        sim.submit(prompt_of(20, 30 + number), 40, ignore_eos=True)
    for _ in range(3):
        sim.advance("a")
    assert [action.request_id for action in sim.sent(Preempt)] == bulk[:8]
    sim.settle()
    assert outputs_are_right(sim)

"""The modes of prefill: beside running decodes, or alone while they wait."""

from caravan_proto.messages.commands import Prefill
from caravan_scheduler.actions import Joins
from caravan_scheduler.config import JoinReason, PrefillMode
from caravan_testing.ledgers import limits_of
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import Simulation, simulation


def test_mixed_mode_carries_decodes_along_with_a_long_prompt() -> None:
    sim = simulation(target_itl_s=0.05)
    running = sim.submit(prompt_of(10), 60, ignore_eos=True)
    for _ in range(5):
        sim.advance("a")
    sim.submit(prompt_of(200), 5)
    before = len(sim.received[running])
    sim.advance("a")  # the decode that was running yields
    prefills = 0
    while any(resident.prefilling for resident in sim.scheduler.shards["a"].stays.residents.values()):
        sim.advance("a")
        prefills += 1
    assert prefills >= 4
    assert len(sim.received[running]) == before + 1 + prefills, "the running request had a token in every step"


def test_mixed_budget_follows_the_target() -> None:
    def largest_chunk(target_s: float) -> int:
        sim = simulation(target_itl_s=target_s, limits=limits_of(cells=4000, cells_per_sequence=4000))
        sim.submit(prompt_of(10), 200, ignore_eos=True)
        for _ in range(40):
            sim.advance("a")
        sim.submit(prompt_of(1500), 5)
        sim.run()
        sizes = [
            sum(len(chunk.token_ids) for chunk in action.chunks)
            for action in sim.actions
            if isinstance(action, Prefill) and action.ride
        ]
        return max(sizes[4:-1])  # after it has learnt

    # The model shard takes 5 ms + 1 ms per token.
    assert 16 <= largest_chunk(0.04) <= 35
    assert 64 <= largest_chunk(0.1) <= 115


def test_pause_mode_prefills_alone_while_decodes_wait() -> None:
    sim = simulation(mode=PrefillMode.PAUSE)
    running = sim.submit(prompt_of(10), 60, ignore_eos=True)
    sim.advance("a")
    sim.advance("a")
    sim.submit(prompt_of(100), 5)
    sim.advance("a")
    before = len(sim.received[running])
    while any(resident.prefilling for resident in sim.scheduler.shards["a"].stays.residents.values()):
        sim.advance("a")
    prefills = [action for action in sim.actions if isinstance(action, Prefill)]
    assert all(prefill.ride == () for prefill in prefills)
    assert len(sim.received[running]) == before


def test_pause_mode_waits_for_the_ratio_or_the_steps() -> None:
    sim = simulation(mode=PrefillMode.PAUSE, waiting_served_ratio=2.0, max_waiting_tokens=10)
    sim.submit(prompt_of(10), 60, ignore_eos=True)
    sim.advance("a")
    waiting = sim.submit(prompt_of(10), 3)
    for _ in range(9):
        sim.advance("a")
        assert len(sim.scheduler.waiting) == 1, "one waiting is less than twice one running"
    sim.advance("a")
    sim.advance("a")
    assert len(sim.scheduler.waiting) == 0, "after max_waiting_tokens steps it starts"
    assert joins(sim) == [JoinReason.WAIT_EXCEEDED]
    sim.run()
    assert waiting in sim.finished

    eager = simulation(mode=PrefillMode.PAUSE, waiting_served_ratio=2.0, max_waiting_tokens=10)
    eager.submit(prompt_of(10), 60, ignore_eos=True)
    eager.advance("a")
    eager.submit(prompt_of(10), 3)
    eager.submit(prompt_of(10), 3)
    assert len(eager.scheduler.waiting) == 0, "two waiting reach the ratio"
    assert joins(eager) == [JoinReason.BACKPRESSURE]


def joins(sim: Simulation) -> list[JoinReason]:
    return [action.reason for action in sim.actions if isinstance(action, Joins)]

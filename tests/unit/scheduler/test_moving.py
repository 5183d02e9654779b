"""Sequences and saved prefixes move from shard to shard."""

from dataclasses import replace

import pytest

from caravan_proto.messages.commands import Load, Prefill
from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_scheduler.actions import Drained, Fetch, Preempt, Preemption, Resume
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Fetched, RunsFound, SavedRun, ShardLimits
from caravan_scheduler.transfers import Transfers
from caravan_testing.simulation import Simulation

PROMPT = tuple(range(100, 160))


def limits(*, cells: int = 400, max_sequences: int = 4, memory: int = 1_000, fingerprint: str = "same") -> ShardLimits:
    layout = LayoutLimits(cells=cells, cells_per_sequence=cells, saving=Saving.ANY)
    return ShardLimits(
        layout=layout,
        max_sequences=max_sequences,
        max_batch_tokens=64,
        memory_bytes=memory,
        run_fingerprint=fingerprint,
    )


def simulation(**shards: ShardLimits) -> Simulation:
    sim = Simulation(SchedulerConfig())
    for name, found in shards.items():
        sim.join(name, found)
    return sim


def start_on(sim: Simulation, name: str, count: int = 1) -> list[int]:
    """Start requests on the only shard so far, ``name``, and let each have some tokens."""
    requests = [sim.submit((key, *PROMPT), 30, ignore_eos=True) for key in range(count)]
    while any(len(sim.received[key]) < 3 for key in requests):
        sim.advance(name)
    return requests


def moving() -> tuple[Simulation, int]:
    """Return a request whose cells are on their way from ``a``, which drains, to ``b``."""
    sim = simulation(a=limits())
    (request,) = start_on(sim, "a")
    sim.join("b", limits())
    sim.drain("a")
    while not sim.transfers:
        sim.advance("a")
    return sim, request


def test_sequences_of_a_draining_shard_continue_elsewhere_from_their_cells() -> None:
    sim = simulation(a=limits())
    requests = start_on(sim, "a", 2)
    sim.join("b", limits())
    sim.drain("a")
    sim.run()
    assert sim.finished == set(requests)
    assert [action.how for action in sim.sent(Preempt)] == [Preemption.SWAP] * 2
    assert {(fetch.source, fetch.target) for fetch in sim.sent(Fetch)} == {("a", "b")}
    assert [action.computed_again for action in sim.sent(Resume)] == [0, 0]
    assert sim.sent(Drained) == [Drained("a")]
    assert "a" not in sim.shards
    sim.check_at_rest()


def test_what_cannot_be_fetched_is_computed_again() -> None:
    for other in (limits(fingerprint="another"), limits(fingerprint=""), limits(memory=0)):
        sim = simulation(a=limits())
        (request,) = start_on(sim, "a")
        sim.join("b", other)
        sim.drain("a")
        sim.run()
        assert sim.finished == {request}
        assert [action.how for action in sim.sent(Preempt)] == [Preemption.RECOMPUTE]
        assert not sim.sent(Fetch)
        (resumed,) = sim.sent(Resume)
        assert resumed.computed_again > len(PROMPT)
        assert sim.sent(Drained) == [Drained("a")]
        sim.check_at_rest()


def test_a_request_whose_transfer_fails_is_computed_again() -> None:
    sim, request = moving()
    sim.finish_transfer(next(iter(sim.transfers)), fails=True)
    sim.run()
    assert sim.finished == {request}
    assert len([fetch for fetch in sim.sent(Fetch) if fetch.target == "b"]) == 2  # again, for what is kept
    sim.check_at_rest()


def test_a_shard_lost_in_a_transfer_costs_a_computation() -> None:
    for lost in ("a", "b"):
        sim, request = moving()
        sim.lose(lost)
        assert not sim.transfers
        sim.join("c", limits())
        sim.run()
        assert sim.finished == {request}
        sim.check_at_rest()


def test_runs_that_came_before_their_source_was_lost_are_known() -> None:
    sim, request = moving()
    transfer_id = next(iter(sim.transfers))
    fetch = sim.transfers.pop(transfer_id)
    came = [sim.shards["b"].adopt(sim.shards["a"].runs.get(key)) for key in fetch.keys]
    assert all(came)
    sim.lose("a")
    sim.handle(Fetched(transfer_id=transfer_id, fetched=tuple(came), seconds=0.02))
    assert set(fetch.keys) <= set(sim.scheduler.shards["b"].runs.keys)
    sim.run()
    assert sim.finished == {request}
    sim.check_at_rest()


def test_sequences_stay_while_no_other_shard_has_room_but_not_forever() -> None:
    sim = simulation(a=limits())
    (first,) = start_on(sim, "a")
    sim.join("b", limits(max_sequences=1))
    blocker = sim.submit(tuple(range(30)), 200, ignore_eos=True)
    while not sim.received[blocker]:
        sim.advance("b")
    sim.drain("a")
    before = len(sim.received[first])
    sim.advance("a", 5)
    assert not sim.sent(Preempt)
    assert len(sim.received[first]) > before
    sim.tick(6.0)
    while not sim.sent(Preempt):
        sim.advance("a")
    sim.run()
    assert sim.finished == {first, blocker}
    sim.check_at_rest()


def test_the_last_shard_ends_what_it_has() -> None:
    sim = simulation(a=limits())
    requests = start_on(sim, "a", 2)
    sim.drain("a")
    sim.run()
    assert sim.finished == set(requests)
    assert not sim.sent(Preempt)
    assert sim.sent(Drained) == [Drained("a")]


def test_prefixes_of_ended_sequences_move_to_a_shard_with_room() -> None:
    sim = simulation(a=limits())
    start_on(sim, "a")
    sim.run()
    sim.join("b", limits())
    sim.drain("a")
    sim.run()
    assert "a" not in sim.shards
    assert [run.saved.start for run in sim.shards["b"].runs.values()] == [0]
    again = sim.complete((0, *PROMPT, 7, 8, 9), 5, ignore_eos=True)
    assert len(sim.sent(Load)) == 1
    assert again in sim.finished
    sim.check_at_rest()


def test_a_prefix_that_another_shard_has_saved_is_fetched_where_that_is_faster() -> None:
    sim = simulation(a=limits(max_sequences=1))
    start_on(sim, "a")
    sim.run()
    sim.tick(1.0)
    sim.run()
    assert sim.shards["a"].runs
    blocker = sim.submit(tuple(range(20)), 200, ignore_eos=True)
    while not sim.received[blocker]:
        sim.advance("a")
    sim.join("b", limits())
    request = sim.submit((0, *PROMPT, 7, 8, 9), 5, ignore_eos=True)
    while request not in sim.finished:
        for transfer_id in list(sim.transfers):
            sim.finish_transfer(transfer_id)
        sim.advance("b")
    assert len(sim.sent(Fetch)) == 1
    (load,) = sim.sent(Load)
    assert load.shard == "b"
    computed = [chunk for step in sim.sent(Prefill) if step.shard == "b" for chunk in step.chunks]
    assert sum(len(chunk.token_ids) for chunk in computed) < 20
    sim.settle()


def test_a_flush_drops_what_arrives_later() -> None:
    sim, request = moving()
    sim.flush("b")
    sim.run()
    assert sim.finished == {request}
    sim.check_at_rest()
    assert set(sim.shards["b"].runs) == set(sim.scheduler.shards["b"].runs.keys)


def test_cells_move_once_both_shards_know_that_their_files_are_the_same() -> None:
    for second in ("same", "another"):
        sim = simulation(a=limits(fingerprint=""))
        (request,) = start_on(sim, "a")
        sim.join("b", limits(fingerprint=""))
        sim.handle(RunsFound("a", "same"))
        sim.handle(RunsFound("b", second))
        sim.handle(RunsFound("gone", "same"))
        sim.drain("a")
        sim.run()
        assert bool(sim.sent(Fetch)) == (second == "same")
        assert [resumed.computed_again > len(PROMPT) for resumed in sim.sent(Resume)] == [second != "same"]
        assert len(sim.received[request]) == 30


def run(size_bytes: int) -> SavedRun:
    return SavedRun(start=0, cuts=((16, bytes(16)),), size_bytes=size_bytes)


def test_a_transfer_waits_for_those_to_the_same_shard() -> None:
    transfers = Transfers()
    alone_s = transfers.seconds("b", 30_000_000)
    assert alone_s == pytest.approx(0.11)
    transfers.begin("a", "b", [run(30_000_000), run(30_000_000)])
    assert transfers.seconds("b", 30_000_000) == pytest.approx(0.31)
    assert transfers.seconds("c", 30_000_000) == alone_s


def test_calls_and_bytes_are_learnt_apart() -> None:
    transfers = Transfers()
    for _ in range(30):
        transfers.end(transfers.begin("a", "b", [run(1_000)]).transfer_id, seconds=0.1)
    assert transfers.seconds("b", 1_000) == pytest.approx(0.1, rel=0.01)
    for _ in range(30):
        transfers.end(transfers.begin("a", "b", [run(10_000_000)]).transfer_id, seconds=1.1)
    assert transfers.seconds("b", 20_000_000) == pytest.approx(2.1, rel=0.01)
    assert transfers.bytes_within(2.1) == pytest.approx(20_000_000, rel=0.01)
    assert transfers.bytes_within(0.05) == 0


def test_a_failure_teaches_nothing_and_ends_the_wait() -> None:
    transfers = Transfers()
    begun = transfers.begin("a", "b", [run(1_000)], request_id=7)
    assert transfers.is_awaited_by(7)
    assert transfers.involve("a")
    assert transfers.involve("b")
    before = transfers.seconds("c", 1_000)
    assert transfers.end(begun.transfer_id) is begun
    assert transfers.end(begun.transfer_id) is None
    assert transfers.seconds("c", 1_000) == before
    assert not transfers.is_awaited_by(7)
    assert not transfers.involve("a")


def test_a_lost_shard_ends_its_transfers_and_a_flush_spoils_them() -> None:
    transfers = Transfers()
    first = transfers.begin("a", "b", [run(1)], request_id=1)
    second = transfers.begin("b", "c", [run(1)], request_id=2)
    third = transfers.begin("c", "d", [run(1)], request_id=3)
    transfers.note_flush("d", None)
    transfers.note_flush("b", b"a key")
    unwanted = [set(transfers.unwanted_keys(one.transfer_id)) for one in (first, second, third)]
    assert unwanted == [{b"a key"}, set(), {run(1).key}]
    transfers.lose("b")
    assert transfers.is_awaited_by(3)
    assert not transfers.is_awaited_by(1)
    assert not transfers.is_awaited_by(2)
    assert transfers.end(first.transfer_id) is None
    # Some of its runs may be at the target.
    assert transfers.end(second.transfer_id) == replace(second, request_id=None)
    assert transfers.end(third.transfer_id) is third
    assert not transfers.unwanted_keys(third.transfer_id)

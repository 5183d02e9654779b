"""Pinned prefixes: what is saved of them stays, within a limit, wherever it is and wherever it goes."""

from typing import Any

from caravan_proto.messages.commands import Load, Save, SetLayout
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_scheduler.actions import Fetch
from caravan_scheduler.core.prefixes import PinRefusal
from caravan_scheduler.events import ShardJoined, ShardLimits, Unpinned
from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_scheduler.shard.remembered import prefixes_of, tokens_of
from caravan_testing.ledgers import limits_of
from caravan_testing.model_runs import STATE_BYTES
from caravan_testing.model_shard import ModelShard
from caravan_testing.simulation import Simulation, simulation

SYSTEM = tuple(range(1, 38))


def key_of(tokens: tuple[int, ...]) -> bytes:
    return PrefixKeys("", lambda start, stop: tokens[start:stop]).at(len(tokens))


KEY = key_of(SYSTEM)


def limits(memory: int = 400, **fields: Any) -> ShardLimits:
    """A cell takes a byte of memory here."""
    return limits_of(cells=400, saving=Saving.ANY, memory_bytes=memory, **fields)


def pinned(sim: Simulation, tokens: tuple[int, ...] = SYSTEM) -> PinRefusal | None:
    return sim.pin(key_of(tokens), length=len(tokens), tokens=tokens)


def ask(sim: Simulation, *prompts: tuple[int, ...]) -> None:
    """Let each prompt be computed, answered and saved."""
    for prompt in prompts:
        sim.complete(prompt, 2, ignore_eos=True)
        sim.tick(0.5)
        sim.run()


def others(count: int) -> list[tuple[int, ...]]:
    return [(100 + number, *range(1, 60)) for number in range(count)]


def saved_on(sim: Simulation, name: str, key: bytes = KEY) -> int:
    """Return how many bytes of runs hold a prefix on a shard."""
    return sum(run.size_bytes for run in sim.scheduler.shards[name].runs.holding(key))


def test_what_is_saved_of_a_pinned_prefix_does_not_make_way() -> None:
    sim = simulation("a", limits=limits())
    assert pinned(sim) is None
    ask(sim, (*SYSTEM, 50, 51))
    assert saved_on(sim, "a") == len(SYSTEM), "a run of its own, without the rest"
    assert prefixes_of(sim.scheduler.shards["a"], KEY).prefixes[0].pinned
    ask(sim, *others(12))
    assert saved_on(sim, "a") == len(SYSTEM)
    assert tokens_of(sim.scheduler.shards["a"], KEY) == SYSTEM
    assert KEY in sim.shards["a"].runs
    sim.handle(Unpinned(KEY))
    ask(sim, *others(24)[12:])
    assert saved_on(sim, "a") == 0
    sim.check_at_rest()


def test_a_prefix_that_was_saved_before_with_more_is_pinned_with_that_run() -> None:
    sim = simulation("a", limits=limits())
    ask(sim, (*SYSTEM[:32], *range(60, 80)))
    assert sim.pin(key_of(SYSTEM[:32]), length=32) is None
    ask(sim, *others(12))
    assert saved_on(sim, "a", key_of(SYSTEM[:32])) == 53
    [shown] = prefixes_of(sim.scheduler.shards["a"], key_of(SYSTEM[:32])).prefixes
    assert (shown.tokens, shown.cells, shown.memory_bytes, shown.pinned) == (32, 0, 0, True)
    assert prefixes_of(sim.scheduler.shards["a"]).pinned_bytes == 53


def test_a_prefix_in_cells_is_saved_when_it_is_pinned_though_a_request_runs() -> None:
    split = limits(cells_per_sequence=100, layout=KvLayout.SPLIT)
    sim = simulation("a", limits=split)
    running = sim.submit((7, 7, 7), 60, ignore_eos=True)
    sim.advance("a")
    held = sim.submit(SYSTEM, 1, ignore_eos=True)
    sim.advance("a", 3)
    assert held in sim.finished
    assert saved_on(sim, "a") == 0
    assert pinned(sim) is None
    sim.advance("a", 3)
    assert running not in sim.finished
    assert saved_on(sim, "a") == len(SYSTEM)
    sim.settle()


def test_more_than_half_of_the_memory_is_refused_with_limit_and_value() -> None:
    sim = simulation("a", "b", limits=limits(memory=100))
    first, second = SYSTEM[:30], tuple(range(60, 90))
    ask(sim, first)
    assert pinned(sim, first) is None
    assert pinned(sim, second) == PinRefusal(limit_bytes=50, needed_bytes=60)
    assert pinned(sim, first) is None, "it is pinned"
    sim.handle(Unpinned(key_of(first)))
    assert pinned(sim, second) is None


def test_the_smallest_shard_decides_and_those_that_save_nothing_do_not() -> None:
    sim = simulation("a", limits=limits(memory=1000))
    sim.join("b", limits(memory=60))
    sim.join("c", limits_of())
    ask(sim, *others(6))
    assert pinned(sim) == PinRefusal(limit_bytes=30, needed_bytes=len(SYSTEM))
    for nothing in (simulation("c"), simulation("a", limits=limits(), prefix_caching=False)):
        assert pinned(nothing) == PinRefusal(limit_bytes=0, needed_bytes=0)


def test_without_a_size_to_go_by_the_limit_holds_nevertheless() -> None:
    sim = simulation("a", limits=limits(memory=60))
    assert pinned(sim) is None
    ask(sim, SYSTEM)
    assert saved_on(sim, "a") == len(SYSTEM)
    assert prefixes_of(sim.scheduler.shards["a"]).pinned_bytes == 0, "it makes way like any other"
    ask(sim, others(1)[0][:50])
    assert saved_on(sim, "a") == 0


def test_a_pin_takes_no_cells_from_running_requests() -> None:
    sim = simulation("a", limits=limits_of(cells=80, cells_per_sequence=80, saving=Saving.ANY, memory_bytes=400))
    assert pinned(sim) is None
    ask(sim, SYSTEM)
    whole = sim.complete(tuple(range(200, 240)), 40, ignore_eos=True)
    assert whole in sim.finished
    assert saved_on(sim, "a") == len(SYSTEM)
    sim.check_at_rest()


def test_a_pinned_prefix_is_loaded_instead_of_computed() -> None:
    sim = simulation("a", limits=limits())
    assert pinned(sim) is None
    ask(sim, SYSTEM, *others(12))
    sim.actions.clear()
    sim.complete((*SYSTEM, *range(60, 90)), 2, ignore_eos=True)
    [load] = sim.sent(Load)
    assert load.entries[0].token_ids == SYSTEM
    sim.check_at_rest()


def test_a_pin_outlives_its_shard_and_holds_again_when_it_is_computed() -> None:
    sim = simulation("a", limits=limits())
    assert pinned(sim) is None
    ask(sim, SYSTEM)
    sim.lose("a")
    [pin] = sim.scheduler.pins
    assert (pin.key, tuple(pin.tokens)) == (KEY, SYSTEM)
    sim.join("a", limits())
    assert saved_on(sim, "a") == 0
    ask(sim, (*SYSTEM, 50, 51), *others(12))
    assert saved_on(sim, "a") == len(SYSTEM)
    sim.check_at_rest()


def test_a_pin_holds_what_a_shard_brings_in_files() -> None:
    disk = limits_of(cells=400, saving=Saving.ANY, memory_bytes=120)
    sim = simulation("a", limits=disk)
    assert pinned(sim) is None
    ask(sim, SYSTEM)
    runs = tuple(run.saved for run in sim.shards["a"].runs.values())
    kept = dict(sim.shards["a"].runs)
    sim.lose("a")
    sim.join("a", disk)
    sim.lose("a")
    sim.shards["a"] = ModelShard("a", disk)
    sim.shards["a"].runs.update(kept)
    sim.handle(ShardJoined("a", disk, runs=runs))
    ask(sim, *others(4))
    assert saved_on(sim, "a") == len(SYSTEM)


def test_a_drain_moves_pinned_prefixes_first() -> None:
    exchanging = ShardLimits(
        layout=LayoutLimits(cells=400, cells_per_sequence=400, saving=Saving.ANY),
        max_sequences=4,
        max_batch_tokens=128,
        memory_bytes=400,
        run_fingerprint="x",
    )
    sim = simulation("a", limits=exchanging)
    assert pinned(sim) is None
    ask(sim, SYSTEM, *others(5))
    sim.join("b", exchanging)
    sim.drain("a")
    sim.run()
    [fetch] = sim.sent(Fetch)
    assert KEY in fetch.keys
    assert "a" not in sim.scheduler.shards
    assert saved_on(sim, "b") == len(SYSTEM)
    ask(sim, *others(12)[6:])
    assert saved_on(sim, "b") == len(SYSTEM)


def test_dropping_a_prefix_ends_its_pin_and_flushing_does_not() -> None:
    sim = simulation("a", limits=limits())
    assert pinned(sim) is None
    ask(sim, SYSTEM)
    sim.flush("a")
    assert [pin.key for pin in sim.scheduler.pins] == [KEY]
    ask(sim, SYSTEM)
    assert saved_on(sim, "a") == len(SYSTEM)
    sim.drop(KEY)
    assert not list(sim.scheduler.pins)
    [longer] = sim.remembered()
    sim.drop(longer)
    sim.run()
    assert not sim.shards["a"].runs


def test_a_sequence_that_holds_a_pin_is_saved_in_two_runs_and_released_once() -> None:
    sim = simulation("a", limits=limits())
    assert pinned(sim) is None
    ask(sim, (*SYSTEM, *range(60, 90)))
    [save] = sim.sent(Save)
    assert [(entry.start, entry.cuts[-1][0], entry.release) for entry in save.entries] == [
        (0, 37, False),
        (37, 68, True),
    ]
    sim.check_at_rest()


def test_a_pin_survives_a_change_of_the_layout() -> None:
    split = LayoutLimits(cells=160, cells_per_sequence=40, layout=KvLayout.SPLIT, saving=Saving.ANY)
    unified = LayoutLimits(cells=160, cells_per_sequence=160, saving=Saving.ANY)
    both = ShardLimits(layout=split, other_layout=unified, max_sequences=4, max_batch_tokens=64, memory_bytes=400)
    sim = simulation("a", limits=both)
    short = SYSTEM[:20]
    assert pinned(sim, short) is None
    sim.complete(short, 1, ignore_eos=True)
    ask(sim, tuple(range(60, 130)), *others(8))
    assert sim.sent(SetLayout)
    assert saved_on(sim, "a", key_of(short)) == len(short)
    sim.check_at_rest()


def test_a_prefix_with_state_is_pinned_with_its_state() -> None:
    sim = simulation("a", limits=limits_of(whole_only=True, saving=Saving.WITH_STATE, memory_bytes=400))
    assert pinned(sim) is None
    sim.complete(SYSTEM, 1, ignore_eos=True)
    ask(sim, *others(10))
    assert saved_on(sim, "a") == len(SYSTEM) + STATE_BYTES
    sim.lose("a")
    sim.join("a", limits_of(whole_only=True, saving=Saving.WITH_STATE, memory_bytes=400))
    ask(sim, (*SYSTEM, 50))
    assert saved_on(sim, "a") == 0, "the state of a longer sequence alone was saved"
    sim.check_at_rest()

"""An operator drops one prefix: what others share stays, and nothing else is left of it."""

from caravan_proto.messages.commands import RunNote, RunSlice, Save
from caravan_scheduler.events import SavedRun
from caravan_scheduler.prefix_keys import PrefixKeys, cuts_between
from caravan_scheduler.shard.remembered import prefixes_of, tokens_of
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedRuns, Tier
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.simulation import Simulation, simulation

TOKENS = list(range(100))
KEYS = PrefixKeys("", lambda start, stop: TOKENS[start:stop])
HELLO = tuple(range(1, 41))


def run(start: int, end: int, *, is_dropped: bool = False) -> SavedRun:
    cuts = tuple((cut, KEYS.at(cut)) for cut in cuts_between(start, end))
    note = RunNote(before=KEYS.at(start), tokens=TOKENS[start:end])
    return SavedRun(start=start, cuts=cuts, size_bytes=10, note=note, is_dropped=is_dropped)


def having(*saved: SavedRun) -> SavedRuns:
    runs = SavedRuns(1000, 0, with_state=False)
    for one in saved:
        runs.add(one)
    return runs


def test_a_run_that_no_other_begins_with_goes_at_once() -> None:
    runs = having(run(0, 40), run(40, 70))
    assert runs.drop(KEYS.at(70)) == [KEYS.at(70)]
    assert list(runs.listed) == [KEYS.at(40)]
    assert runs.used_bytes[Tier.MEMORY] == 10
    assert runs.find(KEYS, 100).length == 40


def test_of_a_run_that_another_begins_with_the_rest_is_not_found_any_more() -> None:
    runs = having(run(0, 40), run(32, 70))
    assert runs.drop(KEYS.at(40)) == []
    assert list(runs.listed) == [KEYS.at(70)]
    assert runs.find(KEYS, 70).slices == (RunSlice(KEYS.at(40), 0, 32), RunSlice(KEYS.at(70), 32, 70))
    other = PrefixKeys("", lambda start, stop: [*TOKENS[:40], 7, 7][start:stop])
    assert runs.find(other, 42).length == 32, "what the other has in common with it"
    assert [one.key for one in runs.holding(KEYS.at(70))] == [KEYS.at(40), KEYS.at(70)]
    assert runs.drop(KEYS.at(70)) == [KEYS.at(70), KEYS.at(40)], "nobody needs it now"
    assert (runs.keys, runs.used_bytes[Tier.MEMORY]) == ((), 0)
    assert runs.find(KEYS, 100) == NO_PREFIX


def test_a_run_that_is_saved_again_is_wanted_again() -> None:
    runs = having(run(0, 40), run(32, 70))
    runs.drop(KEYS.at(40))
    runs.add(run(0, 40))
    assert list(runs.listed) == [KEYS.at(40), KEYS.at(70)]
    assert runs.find(KEYS, 40).length == 40
    assert runs.drop(KEYS.at(70)) == [KEYS.at(70)]


def test_a_run_stays_dropped_on_the_shard_that_fetches_it() -> None:
    source = having(run(0, 40), run(32, 70))
    source.drop(KEYS.at(40))
    target = having(*source.describe(source.keys))
    assert target.drop_unneeded() == []
    assert list(target.listed) == [KEYS.at(70)]
    assert target.find(KEYS, 70).length == 70


def test_a_run_stays_for_one_that_is_being_saved() -> None:
    runs = having(run(0, 40))
    assert runs.drop(KEYS.at(40), {KEYS.at(32)}) == []
    runs.add(run(32, 70))
    assert runs.drop_unneeded() == []
    assert runs.find(KEYS, 70).length == 70


def made(**limits: object) -> Simulation:
    return simulation("a", limits=limits_of(cells=400, **SAVING, **limits))  # type: ignore[arg-type]


def key_of(tokens: tuple[int, ...]) -> bytes:
    return PrefixKeys("", lambda start, stop: tokens[start:stop]).at(len(tokens))


def test_a_parked_prefix_is_dropped_and_another_one_keeps_its_cells() -> None:
    sim = simulation("a")
    sim.submit((*HELLO, 50, 51), 2, ignore_eos=True)
    sim.submit((*HELLO, 60, 61), 2, ignore_eos=True)
    sim.run()
    shard = sim.scheduler.shards["a"]
    first, second = (one.key for one in prefixes_of(shard).prefixes)
    [evicted] = sim.drop(first)
    assert [(one.key, one.tokens, one.cells) for one in evicted.prefixes] == [(first, 43, 3)]
    sim.run()
    assert sim.shards["a"].used_cells == 43
    assert sim.remembered() == [second]
    sim.check_at_rest()


def test_a_saved_prefix_is_dropped_on_every_shard() -> None:
    limits = limits_of(cells=400, **SAVING)
    sim = simulation("a", "b", limits=limits)
    for name in "ab":
        sim.submit(HELLO, 2, ignore_eos=True)
        sim.run()
        sim.tick(0.5)
        sim.run()
        if name == "a":
            sim.drain("a")
            sim.run()
    sim.join("a", limits)
    assert len(sim.remembered()) == 1
    [key] = sim.remembered()
    sim.drop(key)
    sim.run()
    assert not any(shard.runs for shard in sim.shards.values())
    sim.check_at_rest()


def test_a_prefix_that_is_being_saved_is_dropped_when_it_was() -> None:
    sim = made()
    sim.submit(HELLO, 2, ignore_eos=True)
    while not any(isinstance(action, Save) for action in sim.actions):
        sim.advance("a")
    key = key_of((*HELLO, *sim.received[1][:1]))
    sim.drop(key)
    sim.run()
    assert not sim.shards["a"].runs
    assert not sim.remembered()
    sim.check_at_rest()


def test_running_sequences_are_not_disturbed() -> None:
    sim = simulation("a")
    sim.submit(HELLO, 5, ignore_eos=True)
    sim.run()
    [key] = sim.remembered()
    running = sim.submit((*HELLO, 50, 51), 60, ignore_eos=True)
    for _ in range(5):
        sim.advance("a")
    sim.drop(key)
    sim.run()
    assert running in sim.finished
    sim.check_at_rest()


def test_the_tokens_of_a_prefix_are_known_wherever_it_is() -> None:
    sim = simulation("a")
    sim.submit(HELLO, 2, ignore_eos=True)
    sim.run()
    whole = (*HELLO, *sim.received[1][:1])
    assert tokens_of(sim.scheduler.shards["a"], key_of(whole)) == whole, "in cells"
    sim = made()
    sim.submit(HELLO, 2, ignore_eos=True)
    sim.run()
    shard = sim.scheduler.shards["a"]
    assert tokens_of(shard, key_of(whole)) == whole, "in memory"
    sim.submit((*HELLO[:36], 50, 51, 52), 2, ignore_eos=True)
    sim.run()
    other = (*HELLO[:36], 50, 51, 52, *sim.received[2][:1])
    assert tokens_of(shard, key_of(other)) == other, "of a run that begins within another"
    assert tokens_of(shard, key_of(other[:16])) == other[:16]
    assert tokens_of(shard, key_of((9, 9, 9))) is None

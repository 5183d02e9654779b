"""The timeline of a simulated fleet: each step, each mark, and who holds what."""

from typing import Any

import pytest

from caravan_proto.messages.limits import KvLayout, Saving
from caravan_scheduler.events import ShardLimits
from caravan_studio.timeline.messages import Block, Frame, Mark, ShardPicture, State
from caravan_studio.timeline.model_timeline import ModelTimeline
from caravan_testing.ledgers import limits_of
from caravan_testing.model_media import with_pictures
from caravan_testing.simulation import Simulation, simulation

PROMPT = tuple(range(1, 65))


class Watched:
    """A simulation whose scheduler is followed."""

    def __init__(self, *shards: str, limits: ShardLimits, **config: object) -> None:
        self.run: Simulation = simulation(*shards, limits=limits, **config)
        self.timeline = ModelTimeline("toy", self.run.scheduler, self.run.now)
        handle = self.run.scheduler.handle

        def note(events: Any, now: float) -> Any:
            actions = handle(events, now)
            self.timeline.note(events, actions, now)
            return actions

        self.run.scheduler.handle = note  # type: ignore[method-assign]

    def frame(self) -> Frame:
        """Return what happened since the last call."""
        self.run.now += 10.0
        return next(one for one in self.timeline.messages(self.run.now) if isinstance(one, Frame))

    def state(self) -> State:
        self.run.now += 10.0
        return next(one for one in self.timeline.messages(self.run.now) if isinstance(one, State))


def marks(frame: Frame, what: str) -> list[Mark]:
    return [mark for mark in frame.marks if mark.what == what]


def blocks(frame: Frame, kind: str) -> list[Block]:
    return [block for block in frame.blocks if block.kind == kind]


def holders(picture: ShardPicture, at: int) -> set[int]:
    """Return the requests that hold a run of the map: those that end in it or behind it."""
    behind = [index for index, one in enumerate(picture.map) if one.parent == at]
    return set(picture.map[at].running).union(*(holders(picture, index) for index in behind))


def test_chunks_riders_and_sampled_tokens_of_every_step_are_told() -> None:
    watched = Watched("a", limits=limits_of(max_batch_tokens=40))
    first = watched.run.submit(PROMPT, 30, ignore_eos=True)
    watched.run.advance("a", 6)
    second = watched.run.complete(PROMPT[::-1], 5, ignore_eos=True)
    frame = watched.frame()
    computed: dict[int, int] = {}
    for block in blocks(frame, "prefill"):
        for chunk in block.chunks:
            assert chunk.start == computed.get(chunk.request, 0)
            computed[chunk.request] = chunk.start + chunk.tokens
            assert chunk.last == (computed[chunk.request] == len(PROMPT))
    assert computed == {first: 64, second: 64}
    assert any(block.riders == [first] for block in blocks(frame, "prefill")), "a decode rides"
    assert sum(block.tokens for block in frame.blocks) == 30 + 5
    assert [mark.request for mark in marks(frame, "end")] == [second, first]
    assert [(mark.request, mark.number) for mark in marks(frame, "submit")] == [(first, 64), (second, 64)]


def test_a_decode_that_goes_on_is_told_in_parts_that_add_up() -> None:
    watched = Watched("a", limits=limits_of())
    watched.run.submit(PROMPT[:8], 20, ignore_eos=True)
    steps, commands = 0, set()
    for _ in range(4):
        watched.run.advance("a", 4)
        decodes = blocks(watched.frame(), "decode")
        steps += sum(block.steps for block in decodes)
        commands |= {block.command for block in decodes}
    watched.run.run()
    steps += sum(block.steps for block in blocks(watched.frame(), "decode"))
    assert steps == 19, "the prefill sampled the first token"
    assert len(commands) == 1


def test_commands_that_were_under_way_before_somebody_came_are_told() -> None:
    run = simulation("a", limits=limits_of())
    request = run.submit(PROMPT[:8], 20, ignore_eos=True)
    run.advance("a", 4)
    timeline = ModelTimeline("toy", run.scheduler, run.now)
    for event in run.shards["a"].advance():
        timeline.note([event], run.handle(event), run.now)
    [frame, _] = timeline.messages(run.now + 1.0)
    assert isinstance(frame, Frame)
    assert [block.riders for block in frame.blocks] == [[request]]


def test_preemptions_losses_failures_and_cancellations_are_marked() -> None:
    limits = limits_of(cells=100, cells_per_sequence=100, memory_bytes=1 << 20, saving=Saving.ANY)
    watched = Watched("a", limits=limits)
    low = watched.run.submit(PROMPT, 30, ignore_eos=True)
    watched.run.advance("a", 5)
    high = watched.run.submit(PROMPT[::-1], 30, ignore_eos=True, priority=1)
    watched.run.advance("a", 5)
    frame = watched.frame()
    taken = [mark for mark in frame.marks if mark.what in ("swap", "recompute")]
    assert [mark.request for mark in taken] == [low]
    if taken[0].what == "swap":
        assert any(moved.request == low and moved.cells > 0 for one in blocks(frame, "save") for moved in one.moved)
    watched.run.cancel(high)
    watched.run.run()
    watched.run.lose("a")
    frame = watched.frame()
    assert [mark.request for mark in marks(frame, "cancel")] == [high]
    assert [mark.request for mark in marks(frame, "resume")] == [low]
    assert [mark.shard for mark in marks(frame, "lost")] == ["a"]
    late = watched.run.submit(PROMPT, 5)
    watched.run.tick(1000.0)
    assert [(mark.request, mark.shard) for mark in marks(watched.frame(), "fail")] == [(late, "no_shard")]


def test_a_transfer_between_shards_is_a_block_of_its_target() -> None:
    limits = limits_of(memory_bytes=1 << 20, saving=Saving.ANY, max_sequences=1)
    limits = ShardLimits(
        **{name: getattr(limits, name) for name in limits.__dataclass_fields__} | {"run_fingerprint": "f"}
    )
    watched = Watched("a", "b", limits=limits)
    watched.run.complete(PROMPT * 4, 4, ignore_eos=True)
    [holder] = [name for name, shard in watched.run.scheduler.shards.items() if shard.runs.keys or shard.stays.parked]
    watched.run.drain(holder)
    watched.run.run()
    [fetch] = blocks(watched.frame(), "fetch")
    assert (fetch.source, fetch.shard == holder, fetch.bytes > 0) == (holder, False, True)


def test_a_shared_prefix_is_in_the_map_once_and_all_cells_add_up() -> None:
    watched = Watched("a", limits=limits_of())
    ids = [watched.run.submit((*PROMPT, 100 + n), 60, ignore_eos=True) for n in range(3)]
    watched.run.advance("a", 12)
    [picture] = watched.state().shards
    assert sum(one.cells for one in picture.map) == picture.used + picture.cached
    [shared] = [at for at, one in enumerate(picture.map) if one.parent == -1 and one.cells]
    assert picture.map[shared].cells == 63, "the last two tokens of a prompt are computed together"
    assert holders(picture, shared) == set(ids)
    assert {one.request for one in picture.running} == set(ids)
    assert all(one.parent < at for at, one in enumerate(picture.map))


@pytest.mark.parametrize("layout", KvLayout)
def test_what_ended_requests_left_is_in_the_map_or_among_the_runs(layout: KvLayout) -> None:
    limits = limits_of(memory_bytes=1 << 20, saving=Saving.ANY, layout=layout, cells_per_sequence=100)
    watched = Watched("a", limits=limits)
    request = watched.run.complete(PROMPT, 4, ignore_eos=True)
    [picture] = watched.state().shards
    kept = [one for one in picture.map if request in one.kept]
    if not kept:
        assert picture.runs[0].start == 0
        assert picture.runs[0].end >= 64
        assert picture.memory[0] == sum(run.bytes for run in picture.runs)
    assert sum(one.cells for one in picture.map) == picture.used + picture.cached


def test_a_large_map_is_cut_and_says_what_is_missing() -> None:
    watched = Watched("a", limits=limits_of(max_sequences=400, cells=40_000, max_batch_tokens=4096))
    for n in range(300):
        watched.run.submit((1000 + n, *PROMPT[:5]), 100, ignore_eos=True)
    watched.run.advance("a", 8)
    [picture] = watched.state().shards
    assert len(picture.map) == 256
    assert sum(one.cells for one in picture.map) + picture.more_cells == picture.used


class TestReasons:
    """Why requests wait."""

    def reasons(self, watched: Watched) -> dict[int, tuple[str, int, str]]:
        state = watched.state()
        assert state.queued == len(state.queue)
        return {one.request: (one.reason, one.of, one.shard) for one in state.queue}

    def test_no_shard(self) -> None:
        watched = Watched("a", limits=limits_of())
        watched.run.lose("a")
        request = watched.run.submit(PROMPT, 4)
        assert self.reasons(watched) == {request: ("no_shard", 0, "")}

    def test_no_cells_and_no_place(self) -> None:
        watched = Watched("a", limits=limits_of(cells=100, cells_per_sequence=100, max_sequences=2))
        watched.run.submit(PROMPT, 30, ignore_eos=True)
        watched.run.advance("a", 4)
        second = watched.run.submit(PROMPT[::-1], 30, ignore_eos=True)
        watched.run.advance("a")
        assert self.reasons(watched) == {second: ("cells", 0, "")}
        watched = Watched("a", limits=limits_of(max_sequences=1))
        watched.run.submit(PROMPT, 30, ignore_eos=True)
        watched.run.advance("a", 4)
        second = watched.run.submit(PROMPT[::-1], 30, ignore_eos=True)
        assert self.reasons(watched) == {second: ("sequences", 0, "")}

    def test_a_prefix_that_another_request_computes(self) -> None:
        watched = Watched("a", limits=limits_of(max_batch_tokens=100, cells=4000))
        first = watched.run.submit((*PROMPT, *range(70, 170)), 4, ignore_eos=True)
        second = watched.run.submit((*PROMPT, *range(70, 160), 5), 4, ignore_eos=True)
        watched.run.advance("a")
        assert self.reasons(watched)[second] == ("prefix", first, "")

    def test_a_picture_that_is_encoded(self) -> None:
        watched = Watched("a", limits=limits_of())
        prompt, media = with_pictures(PROMPT, [(10, 20, 1)])
        request = watched.run.submit(prompt, 4, media=media)
        assert self.reasons(watched) == {request: ("encoding", 0, "")}
        watched.run.finish_encoding("a")
        assert self.reasons(watched) == {}

    def test_a_step_that_must_end_first(self) -> None:
        watched = Watched("a", limits=limits_of())
        watched.run.submit(PROMPT, 4, ignore_eos=True)
        second = watched.run.submit(PROMPT[::-1], 4, ignore_eos=True)
        assert self.reasons(watched) == {second: ("step", 0, "")}


def test_nothing_of_a_prompt_is_told() -> None:
    watched = Watched("a", limits=limits_of())
    watched.run.submit(tuple(900_000 + n for n in range(40)), 10, ignore_eos=True)
    watched.run.advance("a", 3)
    assert "9000" not in str(watched.timeline.messages(watched.run.now + 1))

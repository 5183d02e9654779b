"""Recordings of simulated schedulers are played again with the same decisions, and a changed scheduler is caught."""

import base64
import gzip
from pathlib import Path
from random import Random

import pytest

from caravan_proto.messages.commands import Load
from caravan_proto.messages.limits import Saving
from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.actions import Left
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.generation import BeamSearch
from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER, cell_numbers
from caravan_scheduler.events import EncodeOutcome, FlushRequested, Replaced, RunsFound, Taken
from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.recording.lines import RecordingFile
from caravan_studio.recording.recorder import Recorder
from caravan_studio.replay.player import Player, play
from caravan_testing.ledgers import limits_of
from caravan_testing.model_media import ENCODER, picture, with_pictures
from caravan_testing.recorded import calls, differences, recorded
from caravan_testing.simulation import Simulation

PROMPT = tuple(range(900, 964))


def busy(path: Path, *, keeps_tokens: bool = False) -> Simulation:
    """Record what a fleet does whose shards save, are lost and drain."""
    run = Simulation(SchedulerConfig())
    recorder = Recorder(path, keeps_tokens=keeps_tokens)
    run.scheduler = recorded(run.scheduler, run.config, recorder)
    limits = limits_of(cells=300, cells_per_sequence=200, memory_bytes=4000, saving=Saving.ANY)
    for name in ("a", "b"):
        run.join(name, limits)
    for number in range(12):
        run.submit((*PROMPT[: 8 * (1 + number % 6)], 7 * number), 20, priority=number % 2, ignore_eos=True)
        run.advance("a")
        run.advance("b")
    run.submit_beams(PROMPT[:20], 6, BeamSearch(width=3, index=0))
    run.cancel(3)
    run.lose("b")
    run.advance("a")
    run.join("b", limits)
    run.complete(PROMPT, 5, prompt_logprobs=True, namespace="salt")
    run.flush("a")
    run.run()
    recorder.close()
    return run


def test_every_decision_is_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    busy(path)
    assert calls(path) > 100
    assert differences(path) == []


def test_no_token_is_in_a_recording_unless_asked(tmp_path: Path) -> None:
    for keeps_tokens in (False, True):
        path = tmp_path / f"recording-{keeps_tokens}"
        busy(path, keeps_tokens=keeps_tokens)
        text = gzip.decompress(path.read_bytes())
        assert (b"[900,901,902" in text) == keeps_tokens
        assert b"salt" not in text
        assert differences(path) == []


def test_a_changed_scheduler_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recording"
    busy(path)
    monkeypatch.setattr("caravan_scheduler.planning.admission._MOST_ASKED", 0)
    [first, *_] = differences(path)
    assert first.recorded != first.played


def test_requests_that_another_scheduler_takes_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder = Recorder(path)
    config = SchedulerConfig()
    run = Simulation(config)
    run.scheduler = recorded(run.scheduler, config, recorder)
    run.join("a", limits_of())
    run.submit(PROMPT, 20, ignore_eos=True)
    run.advance("a", 5)
    run.lose("a")
    [left] = run.handle(Replaced())
    assert isinstance(left, Left)
    run.scheduler = recorded(Scheduler(config), config, recorder)
    run.handle(Taken(left.sequences))
    run.join("b", limits_of())
    run.run()
    recorder.close()
    assert run.finished
    assert calls(path) > 10
    assert differences(path) == []


@pytest.mark.parametrize("many_keys", [16, 1 << 17])
@pytest.mark.parametrize("pictures", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_runs_that_shards_had_before_the_router_are_found_again(
    tmp_path: Path, seed: int, pictures: int, many_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some, the beginning is gone: they were behind it on the disk of a shard that was killed, for example."""
    monkeypatch.setattr("caravan_studio.recording.names._MANY_KEYS", many_keys)
    random = Random(seed)
    limits = limits_of(cells=300, cells_per_sequence=200, memory_bytes=4000, saving=Saving.ANY)

    def work(run: Simulation) -> None:
        for _ in range(14):
            text = (*PROMPT[: 8 * random.randint(1, 8)], random.randint(0, 3))
            prompt, media = with_pictures(text, [(5, 20, random.randint(0, 1))] * pictures)
            run.submit(prompt, 20, media=media, ignore_eos=True)
            for _ in range(random.randint(0, 6)):
                run.advance(random.choice("ab"))
        run.run()

    before, after = Simulation(SchedulerConfig()), Simulation(SchedulerConfig())
    for name in ("a", "b"):
        before.join(name, limits)
    work(before)
    recorder = Recorder(tmp_path / "recording")
    after.scheduler = recorded(after.scheduler, after.config, recorder)
    for name in ("a", "b"):
        runs = before.shards[name].runs
        first = next(key for key, run in runs.items() if not run.saved.start)
        after.join(name, limits, runs={key: run for key, run in runs.items() if key != first})
    work(after)
    recorder.close()
    assert differences(tmp_path / "recording") == []


@pytest.mark.parametrize("is_computed", [False, True])
def test_a_prefix_that_is_pinned_by_its_key_alone_is_found_again(tmp_path: Path, is_computed: bool) -> None:
    limits = limits_of(memory_bytes=4000, saving=Saving.ANY)
    recorder, run = Recorder(tmp_path / "recording"), Simulation(SchedulerConfig())
    run.scheduler = recorded(run.scheduler, run.config, recorder)
    run.join("a", limits)

    def compute() -> None:
        run.complete((*PROMPT[:32], 7), 4, ignore_eos=True)

    if is_computed:
        compute()
    keys = PrefixKeys("", lambda start, stop: PROMPT[start:stop])
    assert run.pin(keys.at(32), length=32) is None
    compute()
    run.complete(PROMPT, 4, ignore_eos=True)
    assert run.scheduler.shards["a"].runs.pinned
    recorder.close()
    assert differences(tmp_path / "recording") == []


@pytest.mark.parametrize("memory_bytes", [0, 4000])
def test_prefixes_that_are_flushed_by_their_keys_are_found_again(tmp_path: Path, memory_bytes: int) -> None:
    """In cells, no line has named them before."""
    recorder, run = Recorder(tmp_path / "recording"), Simulation(SchedulerConfig())
    run.scheduler = recorded(run.scheduler, run.config, recorder)
    run.join("a", limits_of(memory_bytes=memory_bytes, saving=Saving.ANY))
    run.complete(PROMPT, 4, ignore_eos=True)
    shard = run.scheduler.shards["a"]
    keys = [*shard.runs.listed, *(resident.prefix_key for resident in shard.stays.parked.values())]
    for flush_id, key in enumerate([b"of nothing", *keys]):
        run.handle(FlushRequested(flush_id, frozenset("a"), key))
    evicted = [prefix.tokens for flush_id in range(len(keys) + 1) for prefix in run.flushed[flush_id][0].prefixes]
    assert evicted
    recorder.close()
    assert differences(tmp_path / "recording") == []


def shown(path: Path, *, saving: Saving = Saving.ANY, keeps_tokens: bool = False) -> None:
    """Record prompts with pictures that are encoded, refused, forgotten, saved and loaded again."""
    run = Simulation(SchedulerConfig())
    recorder = Recorder(path, keeps_tokens=keeps_tokens)
    run.scheduler = recorded(run.scheduler, run.config, recorder)
    whole_only = saving is Saving.WITH_STATE
    limits = limits_of(
        cells=150, cells_per_sequence=150, memory_bytes=4000, saving=saving, whole_only=whole_only, max_sequences=2
    )
    run.join("a", limits)
    prompts = [with_pictures((*PROMPT, 7 * number), [(5, 20, number % 3), (40, 9, 5)]) for number in range(6)]
    for prompt, media in prompts:
        run.submit(prompt, 8, media=media, ignore_eos=True)
    run.finish_encoding("a", EncodeOutcome.FAILED)
    run.run()
    run.shards["a"].encoded.clear()
    for _ in range(3):
        run.tick(0.5)
        run.run()
    before = len(run.actions)
    for prompt, media in prompts:
        run.complete((*prompt, 9, 8, 7), 8, media=media, ignore_eos=True)
    assert run.sent(Load, since=before), "nothing was saved"
    run.lose("a")
    run.join("a", limits)
    run.complete(prompts[0][0], 8, media=prompts[0][1])
    recorder.close()


@pytest.mark.parametrize("saving", [Saving.ANY, Saving.WITH_STATE])
def test_media_and_what_became_of_them_are_played_again(tmp_path: Path, saving: Saving) -> None:
    path = tmp_path / "recording"
    shown(path, saving=saving)
    decisions = [one for played in play(RecordingFile(path), Player()) for one in played.decisions]
    assert {"prefill", "load"} <= {one[0] for one in decisions}
    assert differences(path) == []


@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_nothing_of_a_picture_is_in_a_recording(tmp_path: Path, keeps_tokens: bool) -> None:
    path = tmp_path / "recording"
    shown(path, keeps_tokens=keeps_tokens)
    text = gzip.decompress(path.read_bytes())
    shows = picture(1)
    cells = cell_numbers(MediaSpan(offset=0, media_id=shows.id, count=1, positions=1), ENCODER)
    for told in (shows.id, shows.rgb, ENCODER):
        assert base64.b64encode(told).rstrip(b"=") not in text
    assert str(cells[0]).encode() not in text
    assert str(FIRST_CELL_NUMBER)[:6].encode() in text, "cells have numbers above all tokens"
    assert differences(path) == []


def test_runs_that_a_shard_finds_late_are_used_in_a_recording_as_they_were(tmp_path: Path) -> None:
    limits = limits_of(cells=300, cells_per_sequence=200, memory_bytes=4000, saving=Saving.ANY)
    before = Simulation(SchedulerConfig())
    before.join("a", limits)
    for number in range(4):
        before.submit((number, *PROMPT), 5, ignore_eos=True)
    before.run()
    saved = before.shards["a"].runs
    before.drain("a")
    before.run()
    assert saved

    path = tmp_path / "recording"
    run = Simulation(SchedulerConfig())
    recorder = Recorder(path)
    run.scheduler = recorded(run.scheduler, run.config, recorder)
    run.join("a", limits)
    run.complete((0, *PROMPT), 5, ignore_eos=True)
    assert not run.sent(Load)
    run.shards["a"].runs.update(saved)
    run.handle(RunsFound("a", "f", tuple(sorted((one.saved for one in saved.values()), key=lambda one: one.start))))
    run.complete((1, *PROMPT), 5, ignore_eos=True)
    recorder.close()
    assert run.sent(Load)
    assert differences(path) == []

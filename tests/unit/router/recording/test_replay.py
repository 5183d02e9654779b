"""Recordings of simulated schedulers are played again with the same decisions, and a changed scheduler is caught."""

import gzip
from pathlib import Path

import pytest

from caravan_proto.messages.limits import Saving
from caravan_router.core.generation import BeamSearch
from caravan_router.recording.recorder import Recorder
from caravan_router.scheduling.actions import Left
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import Replaced, Taken
from caravan_router.scheduling.scheduler import Scheduler
from caravan_testing.ledgers import limits_of
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
    run.submit(PROMPT, 5, prompt_logprobs=True, namespace="salt")
    run.run()
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
    monkeypatch.setattr("caravan_router.scheduling.planning.admission._MOST_ASKED", 0)
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
    for _ in range(5):
        run.advance("a")
    run.lose("a")
    [left] = run.handle(Replaced())
    assert isinstance(left, Left)
    assert recorder.passing == 1, "no part begins while nobody has the requests"
    run.scheduler = recorded(Scheduler(config), config, recorder)
    run.handle(Taken(left.sequences))
    assert recorder.passing == 0
    run.join("b", limits_of())
    run.run()
    recorder.close()
    assert run.finished
    assert calls(path) > 10
    assert differences(path) == []

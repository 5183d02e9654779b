"""What a recording is as a file: its parts, its end after a crash, and files that are none."""

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.limits import Saving
from caravan_router.config import RouterConfig
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Submitted, Tick
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.recording.lines import RecordingError, RecordingFile
from caravan_studio.recording.recorder import Recorder, RecordFileError
from caravan_studio.replay.cli import main
from caravan_studio.replay.player import Player, play
from caravan_studio.timeline.messages import Hello, Message
from caravan_testing.ledgers import limits_of
from caravan_testing.recorded import calls, differences, recorded
from caravan_testing.requests import request
from caravan_testing.simulation import Simulation
from caravan_testing.waiting import wait_until

LIMITS = limits_of(cells=300, cells_per_sequence=200, memory_bytes=4000, saving=Saving.ANY)


def run(recorder: Recorder, requests: int = 30) -> Simulation:
    simulation = Simulation(SchedulerConfig())
    simulation.scheduler = recorded(simulation.scheduler, simulation.config, recorder)
    simulation.join("a", LIMITS)
    for number in range(requests):
        thought = Thought(closings=(b".",), ending=(7, 8), max_tokens=number % 7 or None) if number % 2 else None
        request_id = simulation.submit((*range(20), *range(number, number + 10)), 8, ignore_eos=True, thought=thought)
        simulation.advance("a")
        simulation.end_thought(request_id - number % 3)
    simulation.run()
    return simulation


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "recording"
    recorder = Recorder(path)
    run(recorder)
    recorder.close()
    return path


def lines(path: Path) -> list[Any]:
    return [msgspec.json.decode(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def rewritten(path: Path, changed: list[Any]) -> Path:
    path.write_bytes(gzip.compress(b"".join(msgspec.json.encode(line) + b"\n" for line in changed)))
    return path


def test_a_recording_that_fills_its_space_ends_and_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("caravan_studio.recording.line_file._FLUSH_S", 0.0)
    path = tmp_path / "recording"
    recorder = Recorder(path, most_bytes=10_000)
    while not recorder.has_ended:
        run(recorder)
        wait_until(lambda: recorder._file.waiting_bytes == 0, "all is written")
    size = path.stat().st_size
    run(recorder)
    recorder.close()
    assert [record.__dict__["reason"] for record in caplog.records] == ["its space was full"]
    assert path.stat().st_size <= size + 100, "nothing but the end of the file came after it"
    assert list(tmp_path.iterdir()) == [path]
    assert main(RouterConfig, [str(path)]) == 0
    assert "all are the same; it ended before the router: its space was full\n" in capsys.readouterr().out


def test_a_recording_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    for requests in (5, 10):
        recorder = Recorder(path)
        run(recorder, requests)
        recorder.close()
    assert calls(path) > calls(tmp_path / "recording.1") > 5
    assert differences(path) == differences(tmp_path / "recording.1") == []


def test_after_a_crash_it_is_played_up_to_the_cut(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = calls(recording)
    recording.write_bytes(recording.read_bytes()[:-200])
    assert main(RouterConfig, [str(recording)]) == 0
    told = capsys.readouterr().out
    assert "all are the same; its end is cut off" in told
    assert 0 < calls(recording) < whole


def test_another_process_decides_the_same(recording: Path) -> None:
    for seed in ("1", "2"):
        command = [sys.executable, "-c", "from caravan_serve.commands import main; raise SystemExit(main())", "replay"]
        ended = subprocess.run(
            [*command, str(recording)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "all are the same" in ended.stdout


def test_the_command_shows_what_was_decided_and_what_is(
    recording: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caravan_scheduler.planning.admission._MOST_ASKED", 0)
    assert main(RouterConfig, [str(recording)]) == 1
    told = capsys.readouterr().out
    assert "call 2, " in told
    assert 'recorded  ["start",1,"a",30,0]' in told
    assert "now       nothing" in told


def test_an_error_of_the_scheduler_is_recorded_and_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    recorder = Recorder(path)
    scheduler = recorded(Scheduler(SchedulerConfig()), SchedulerConfig(), recorder)
    twice = Submitted(request(1, (1, 2, 3), 4))
    scheduler.handle([twice], 0.0)
    scheduler.handle([twice], 1.0)
    scheduler.handle([Tick()], 2.0)
    recorder.close()
    calls = [line["call"][3] for line in lines(path) if "call" in line]
    assert [["faulted", "AssertionError", [1], False] in call for call in calls] == [False, True, False]
    assert differences(path) == []


def test_the_page_finds_messages_of_the_timeline(recording: Path) -> None:
    messages = [msgspec.convert(line["page"], Message) for line in lines(recording) if "page" in line]
    assert isinstance(messages[0], Hello)
    assert {type(message).__name__ for message in messages[1:]} == {"Frame", "State"}


def test_a_file_of_another_version_is_refused_by_name(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rest = lines(recording)
    header["caravan_recording"]["version"] = 99
    assert main(RouterConfig, [str(rewritten(recording, [header, *rest]))]) == 2
    assert "it has version 99 of the format, and this program reads version 2" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"hello\n", b'{"a":1}\n'])
def test_compressed_text_that_is_no_recording_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(text))
    with pytest.raises(RecordingError):
        RecordingFile(path)


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_what_is_not_compressed_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        RecordingFile(path)


@pytest.mark.parametrize(
    "line",
    [
        {"call": [7, 1.0, [], [], ""]},
        {"call": [1, 1.0, [["submit", 1]], [], ""]},
        {"call": [1, 1.0, [["evil", 1]], [], ""]},
        {"call": [1, 1.0, [["take", [5]]], [], ""]},
        {"call": [1, 1.0, [["unpin", 5]], [], ""]},
        {"call": [1, 1.0, [["step", "a", 1, "ok", 0, 0, 0, [], [], [], [], [], [-1]]], [], ""]},
        {"scheduler": {"id": 1, "model": "x", "config": {"mode": "evil"}}},
        {"scheduler": {"id": 1, "model": "x", "config": {"evil": 1}}},
    ],
    ids=lambda line: msgspec.json.encode(line).decode()[:60],
)
def test_a_hostile_line_is_refused(recording: Path, line: Any, capsys: pytest.CaptureFixture[str]) -> None:
    header, _, scheduler, *_ = lines(recording)
    assert main(RouterConfig, [str(rewritten(recording, [header, scheduler, line]))]) == 2
    assert "caravan replay: error:" in capsys.readouterr().err


def test_events_that_contradict_each_other_are_a_difference(recording: Path) -> None:
    header, _, scheduler, *_ = lines(recording)
    limits = {"layout": {"cells": -5, "cells_per_sequence": 0}, "max_sequences": -3, "max_batch_tokens": -1}
    joined = {"call": [1, 1.0, [["join", "a", limits, [], False], ["cancel", 99], ["end", "b", 7]], [], ""]}
    played = list(play(RecordingFile(rewritten(recording, [header, scheduler, joined])), Player()))
    assert len(played) == 1


def test_a_file_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecordFileError, match="No such file"):
        Recorder(tmp_path / "missing" / "recording")
